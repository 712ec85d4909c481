"""Search-QA: adapter of ``trial/SearchQA-v0``, and the template for the response format of Search-R1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trial_envs.core.projection import Projection
from trial_envs.search_qa.tool_env import SearchQAToolEnv
from trial_envs.search_qa.world import SHORT_NAMES
from trial_ray.adapters.adapter import (
    NAVIGATION,
    Demonstrator,
    EnvironmentAdapter,
    ReportLabels,
    WarmStartSpec,
    generated_games,
)
from trial_ray.adapters.templates import ConversationTemplate, PlainTemplate, TaggedTemplate

ROLE = (
    "You answer a question with the passages that a search engine finds. In an action, put your own words in place of the "
    "placeholder."
)


@dataclass(frozen=True)
class SearchR1Template(ConversationTemplate):
    """Conversation template in Search-R1's response format, for an environment that was created with ``style="search_r1"``."""

    form: ClassVar[str] = (
        "Reason between <think> and </think> whenever you get new information. If you lack knowledge, write a query between "
        "<search> and </search>; the best passages are then returned between <information> and </information>. You may search "
        "several times. As soon as you know the answer, write it alone between <answer> and </answer>."
    )

    def project(self, response: str) -> Projection:
        """Return the whole response as the action: the environment itself reads the ``<search>`` and ``<answer>`` tags."""
        return Projection(response, any(f"</{name}>" in response for name in ("search", "answer")))


def _demonstrator() -> Demonstrator:
    from trial_envs.search_qa.expert import SearchExpert

    return SearchExpert()


ADAPTER = EnvironmentAdapter(
    env_id="trial/SearchQA-v0",
    title="Search-QA",
    templates={
        "tagged": TaggedTemplate(ROLE, dropped="^Question: "),
        "plain": PlainTemplate(dropped_lines="^Question: .*$"),
    },
    tools=SearchQAToolEnv,
    skills={
        "": "Search with the name that the question contains, not with the whole question. If the passages name a person, a place "
        "or an organisation on the way to the answer, search for that name next. Answer with the name or the year alone."
    },
    warm_start=WarmStartSpec(demonstrator=_demonstrator, generated=generated_games, interchangeable=(SHORT_NAMES,)),
    labels=ReportLabels(
        action_patterns=((r"search\[", NAVIGATION),),
        family_titles={
            "nq": "NQ",
            "triviaqa": "TriviaQA",
            "popqa": "PopQA",
            "hotpotqa": "HotpotQA",
            "2wikimultihopqa": "2Wiki",
            "musique": "MuSiQue",
            "bamboogle": "Bamboogle",
            "one_hop": "1 hop",
            "two_hop": "2 hops",
            "three_hop": "3 hops",
            "comparison": "Comparison",
        },
        split_titles={"generated_test": "Search-QA"},
    ),
)
