"""Reward of a purchase: the score of the product type times the fulfilled share of attributes, options and price limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.product import Product

try:
    from rapidfuzz.fuzz import token_set_ratio
    from rapidfuzz.utils import default_process
except ImportError as error:
    raise MissingPackageError(f"Not installed: rapidfuzz; {install_command('webshop')}") from error

MATCH = 85
"""Two texts match if their token-set ratio by rapidfuzz (0 to 100) is above this number."""

# The order matters: if a text contains several colours, the first of them in this list is the text's colour.
_COLOUR_WORDS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream "
    "crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather "
    "indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha "
    "multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal "
    "rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise "
    "violet walnut wheat white wine yellow"
)
COLOURS = tuple(_COLOUR_WORDS.split())

_LATIN_1 = dict.fromkeys(range(128, 256))


@dataclass(frozen=True, slots=True)
class PurchaseReward:
    """A reward and its parts, with the names of WebShop's own code.

    Attributes:
        reward: in [0, 1].
        r_type: type score, 1, 0.5, 0.1 or 0; see :func:`type_reward`.
        query_match: whether the bought product's ``query`` equals the goal's.
        category_match: whether the bought product's category shares at least two levels with the goal's.
        title_score: share of the nouns in the title of the goal's product that are in the bought product's title; 0.2 if the
            title of the goal's product has no nouns.
        r_att, r_option: shares of the goal's attributes and options that match; ``r_option`` is ``None`` without options.
        r_price: whether the price is within the limit.
        w_att, w_option, w_price: weights of attributes, options and price; ``w_option`` is ``None`` without options.
    """

    reward: float
    r_type: float
    query_match: bool
    category_match: bool
    title_score: float
    r_att: float
    w_att: float
    r_option: float | None
    w_option: float | None
    r_price: bool
    w_price: float

    def parts(self) -> dict[str, float | bool]:
        """Return the parts of the reward by name; the parts for options are included only if the goal has options."""
        names = (name for name in self.__slots__ if name != "reward")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def purchase_reward(
    product: Product, price: float, options: Mapping[str, str], goal: Goal, goal_nouns: Sequence[str]
) -> PurchaseReward:
    """Return the reward for buying a product.

    The reward is the type score (:func:`type_reward`) times (matching attributes + matching options + 1 if the price is within
    the limit), divided by (number of the goal's attributes + number of its options + 1).

    Args:
        product: the bought product.
        price: its price in dollars.
        options: chosen values by option name.
        goal: goal of the episode.
        goal_nouns: nouns of the title of the goal's product.
    """
    query_match = product.query == goal.query
    category_match = len(_levels(product.product_category) & _levels(goal.product_category)) >= 2
    title_score = len({*product.title_nouns} & {*goal_nouns}) / len(goal_nouns) if goal_nouns else 0.2
    r_type = type_reward(query_match or category_match, title_score)

    targets = goal.option_targets
    attributes = count_attributes(product, goal.attributes)
    matched = count_options(options.values(), targets)
    within = price <= goal.price_upper
    num_parts = len(goal.attributes) + len(targets) + 1
    return PurchaseReward(
        reward=(attributes + matched + within) / num_parts * r_type,
        r_type=r_type,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
        r_att=attributes / len(goal.attributes),
        w_att=len(goal.attributes) / num_parts,
        r_option=matched / len(targets) if targets else None,
        w_option=len(targets) / num_parts if targets else None,
        r_price=within,
        w_price=1 / num_parts,
    )


def type_reward(same_kind: bool, title_score: float) -> float:
    """Return how well the type of the bought product fits the goal: 1, 0.5, 0.1 or 0.

    Args:
        same_kind: whether the bought product's query or category matches the goal's.
        title_score: share of the nouns in the title of the goal's product that are in the bought product's title.
    """
    if title_score == 0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    return 1.0 if same_kind or title_score > 0.2 else 0.5


def count_attributes(product: Product, wanted: Sequence[str]) -> int:
    """Return the number of wanted attributes that a product has, as an attribute or in its title, features or description."""
    texts = (product.title.lower(), " ".join(product.features).lower(), product.description.lower())
    return sum(
        any(texts_match(own, attribute) for own in product.attributes) or any(attribute in text for text in texts)
        for attribute in wanted
    )


def count_options(chosen: Iterable[str], targets: Sequence[tuple[str, str] | str]) -> int:
    """Return the number of wanted options (``targets``) that at least one chosen value matches."""
    values = [plain_colour(value) for value in chosen]
    wanted = [target_text(target) for target in targets]
    return sum(any(texts_match(value, text) for value in values) for text in wanted)


def option_matches(value: str, target: tuple[str, str] | str) -> bool:
    """Return whether choosing ``value`` fulfils the wanted option ``target``."""
    return texts_match(plain_colour(value), target_text(target))


def target_text(target: tuple[str, str] | str) -> str:
    """Return the text of a wanted option with which chosen values are compared.

    If the name or the value of a (name, value) pair is in :data:`COLOURS`, the text is this colour; the text of any other pair
    is ``str`` of the Python tuple. WebShop's own code does the same, so some goals cannot be fulfilled.
    """
    if isinstance(target, str):
        return plain_colour(target)
    return next((colour for colour in COLOURS if colour in target), str(target))


@lru_cache(maxsize=1 << 12)
def plain_colour(text: str) -> str:
    """Return the first of :data:`COLOURS` that the text contains, else the text."""
    return next((colour for colour in COLOURS if colour in text), text)


@lru_cache(maxsize=1 << 12)
def texts_match(text: str, other: str) -> bool:
    """Return whether the token-set ratio of two texts is above :data:`MATCH`; characters 128 to 255 are ignored."""
    return round(token_set_ratio(_plain(text), _plain(other))) > MATCH


def _plain(text: str) -> str:
    return default_process(text.translate(_LATIN_1))


def _levels(category: str) -> set[str]:
    return {level.strip() for level in category.split("›")}
