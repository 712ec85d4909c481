"""WebShop: adapter of ``trial/WebShop-v0``."""

from __future__ import annotations

from trial_envs.webshop.tool_env import WebShopToolEnv
from trial_ray.adapters.adapter import (
    ACQUISITION,
    NAVIGATION,
    OTHER,
    PLACEMENT,
    Demonstrator,
    EnvironmentAdapter,
    ReportLabels,
    WarmStartSpec,
    generated_games,
)
from trial_ray.adapters.templates import PlainTemplate, TaggedTemplate

BANNER = r"^(WebShop \[SEP\] )?Instruction: \[SEP\] .*? \[SEP\] "
"""Pattern of the start of every page of the shop, which repeats the task; prompts state the task separately."""
BUTTONS = (
    r"((?<=\[SEP\] )(Back to Search|< Prev|Next >|Description|Features|Reviews|Buy Now|Search)(?= \[SEP\]|$))|\[SEP\]"
)
"""Pattern of ``[SEP]``, which separates the texts of a page, and of button labels, which are also in the list of actions."""
_SHOP = (
    "Search with the product's kind and its two or three most telling properties, not with the whole instruction. "
    "Prefer results whose title names these properties and whose price is below the limit. On the product's page "
    "choose every option that the instruction names before you buy; a missing option costs reward. If the price is "
    "over the limit or an option is not on offer, go back and take another result instead of searching again. "
)

SKILLS = {
    "": _SHOP.strip(),
    "fashion": _SHOP + "For clothes and shoes search with the garment and whom it is for, then choose the fit or type "
    "where one is named, the colour as it is written, and the size; variants differ in price, so look at the price "
    "again when all are chosen.",
    "garden": _SHOP
    + "For furniture and home textiles the size decides: take the one whose numbers are exactly those of "
    "the instruction, not the nearest, and choose colour and shape as well. Material and care are told under the "
    "features.",
    "beauty": _SHOP
    + "For care and beauty products look for the property that was asked for, such as what they are free "
    "of or what they are for, in the title or under the features; colours and sizes often have names or numbers of "
    "their own, so choose the label that repeats the instruction's.",
    "electronics": _SHOP + "For electronics a wrong model is worth little: check that the technical properties of the "
    "instruction stand in the title or under the features before you choose colour, size or style.",
    "grocery": _SHOP
    + "For food and drink look for the diet or ingredient that was asked for, choose the flavour by its "
    "full name, and take the pack whose weight and count are both those of the instruction.",
}
"""Advice by department, for the ``"skill"`` teacher context. The advice is prior knowledge about the tasks, so results of a
method that uses it are not comparable with results of a method that learns only from the outcomes of rollouts."""


def _demonstrator() -> Demonstrator:
    from trial_envs.webshop.explorer import ExplorerOracle

    return ExplorerOracle()


ADAPTER = EnvironmentAdapter(
    env_id="trial/WebShop-v0",
    title="WebShop",
    templates={
        "tagged": TaggedTemplate(
            "You are an agent who shops in a web store: find the product that the instruction describes, choose its "
            "options and buy it. In a search action, put your own words in place of the placeholder.",
            dropped=BANNER,
            tail=20,
        ),
        "plain": PlainTemplate(dropped_lines=f"{BANNER}|{BUTTONS}"),
    },
    tools=WebShopToolEnv,
    skills=SKILLS,
    warm_start=WarmStartSpec(demonstrator=_demonstrator, generated=generated_games),
    # Reports use the same action classes as for ALFWorld: opening a product is an acquisition, choosing an option is a
    # placement, and searching and turning pages are navigation. Product ids of generated shops begin with G.
    labels=ReportLabels(
        action_patterns=(
            (r"search\[", NAVIGATION),
            (r"click\[(next >|< prev|back to search)\]$", NAVIGATION),
            (r"click\[(description|features|reviews|attributes|buy now)\]$", OTHER),
            (r"click\[(?=\w{10}\])[bg]\w*\d\w*\]$", ACQUISITION),
            (r"click\[.+\]$", PLACEMENT),
        ),
        split_titles={"test": "WebShop"},
    ),
    defaults={"max_prompt_tokens": 4096},
)
