"""ALFWorld: adapter of ``trial/ALFWorld-v0``."""

from __future__ import annotations

from trial_envs.alfworld.tool_env import ALFWorldToolEnv
from trial_ray.adapters.adapter import (
    ACQUISITION,
    NAVIGATION,
    PLACEMENT,
    Demonstrator,
    EnvironmentAdapter,
    ReportLabels,
    WarmStartSpec,
    generated_games,
)
from trial_ray.adapters.templates import PlainTemplate, TaggedTemplate

HELP = frozenset({"help"})
"""Admissible actions that prompts do not list: ``help`` is always admissible, and its observation contains nothing new."""
_SEARCH = (
    "Objects may be on any surface or inside anything that opens. Visit places one after the other, open what is closed, "
    "read what is there, and do not return to a place already seen. "
)

SKILLS = {
    "": _SEARCH + "Take an object only if the task names it. When you hold it, do what the task asks, then bring it "
    "to its destination.",
    "pick_and_place_simple": _SEARCH + "Take the named object as soon as you see it, go to the destination, open it "
    "if it is closed, and move the object there.",
    "look_at_obj_in_light": _SEARCH + "Take the object to be examined first. Then find the place with the desk lamp "
    "and use the lamp while you hold the object.",
    "pick_clean_then_place_in_recep": _SEARCH + "Carry the object to a sink basin and clean it there before you bring "
    "it to its destination; unwashed it does not count.",
    "pick_heat_then_place_in_recep": _SEARCH + "Carry the object to the microwave and heat it there before you bring "
    "it to its destination.",
    "pick_cool_then_place_in_recep": _SEARCH + "Carry the object to the fridge and cool it there before you bring it "
    "to its destination.",
    "pick_two_obj_and_place": _SEARCH + "You can hold one object at a time: bring the first to the destination, then "
    "look for a second of the same kind, and remember where you saw more than one.",
}
"""Advice by task family, for the ``"skill"`` teacher context. The advice is prior knowledge about the tasks, so results of a
method that uses it are not comparable with results of a method that learns only from the outcomes of rollouts."""

OBJECT_TYPES = """
alarmclock apple baseballbat basketball book boots bowl box bread butterknife candle cd cellphone cloth creditcard cup
desklamp dishsponge egg floorlamp footstool fork glassbottle handtowel houseplant kettle keychain knife ladle laptop
lettuce lightswitch mirror mug newspaper painting pan papertowel papertowelroll pen pencil peppershaker pillow plate
plunger poster pot potato remotecontrol saltshaker scrubbrush soapbar soapbottle spatula spoon spraybottle statue
teddybear television tennisracket tissuebox toiletpaper toiletpaperroll tomato towel vase watch wateringcan winebottle
"""
RECEPTACLE_TYPES = """
armchair bathtub bathtubbasin bed cabinet cart coffeemachine coffeetable countertop desk diningtable drawer dresser
fridge garbagecan handtowelholder laundryhamper microwave ottoman paintinghanger safe shelf sidetable sink sinkbasin
sofa stoveburner toaster toilet toiletpaperhanger towelholder tvstand
"""
VERBS = "clean close cool examine find go heat help inventory look move open pick place put slice take turn use"
GRAMMAR_WORDS = """
ALFRED Available In Looking Next Nothing On TextWorld The There This Welcome You Your a about an and anything are around
arrive at carrying check closed cold commands current don down facing floor from happens hot in is it location middle
normal not nothing object of off on or quickly receptacle room s see sharp sliced some something special switch t task
that the them to two under up using with you your
"""


def _demonstrator() -> Demonstrator:
    from trial_envs.alfworld.oracle import ExplorerOracle

    return ExplorerOracle()


ADAPTER = EnvironmentAdapter(
    env_id="trial/ALFWorld-v0",
    title="ALFWorld",
    templates={
        "tagged": TaggedTemplate(
            "You are an agent who does household chores in ALFWorld, a house described in text.", HELP
        ),
        "plain": PlainTemplate(dropped_lines=r"^-= .* =-$|^your task is to:.*$", hidden_actions=HELP),
    },
    tools=ALFWorldToolEnv,
    skills=SKILLS,
    warm_start=WarmStartSpec(
        demonstrator=_demonstrator,
        generated=generated_games,
        vocabulary=tuple(" ".join((OBJECT_TYPES, RECEPTACLE_TYPES, VERBS, GRAMMAR_WORDS)).split()),
        interchangeable=(tuple(OBJECT_TYPES.split()), tuple(RECEPTACLE_TYPES.split())),
    ),
    labels=ReportLabels(
        action_patterns=((r"take ", ACQUISITION), (r"(move|put) ", PLACEMENT), (r"go to ", NAVIGATION)),
        family_titles={
            "pick_and_place_simple": "P&P",
            "pick_two_obj_and_place": "Two",
            "look_at_obj_in_light": "Look",
            "pick_heat_then_place_in_recep": "Heat",
            "pick_cool_then_place_in_recep": "Cool",
            "pick_clean_then_place_in_recep": "Clean",
        },
        split_titles={"valid_seen": "ALFWorld Seen", "valid_unseen": "ALFWorld Unseen"},
    ),
)
