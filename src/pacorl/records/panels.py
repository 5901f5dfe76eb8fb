"""The panel writer: one sentence that asks for several images → the texts of a set's panels.

    draft = write_panels("Generate four images of the same dentist: reading an X-ray, cleaning teeth, …")
    draft.theme, draft.panels, draft.note

It reads counts, lists and quotations from the sentence.
"""

import math
import re
from dataclasses import dataclass, field

from pacorl.core.grid import QUOTED, panel_texts
from pacorl.io.terminal import excerpt
from pacorl.types import SetCriteria

DEFAULT_COUNT = 4
"""Panels of a request without a number, such as "several images"."""
MAX_COUNT = 16
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)


@dataclass(frozen=True, slots=True)
class SetRequest:
    """Request for several images, in one sentence."""

    count: int | None
    """Number of panels; None if the sentence names none."""
    content: str
    """The sentence behind its count: the subject, and a list if there is one."""


@dataclass(frozen=True, slots=True)
class PanelDraft:
    """The texts of one set, to be shown to a person before anything is generated."""

    theme: str
    """Common theme of the panels."""
    panels: tuple[str, ...]
    """One text per panel, row-major."""
    criteria: SetCriteria = field(default_factory=dict)
    note: str = ""
    """Missing information in the sentence, and the remedy; empty if complete."""


def write_panels(text: str, *, count: int | None = None) -> PanelDraft:
    """Write the panels of a request; without a list they differ by stage, by a varied attribute, or by view.

    Args:
        count: number of panels; the sentence's own, else `DEFAULT_COUNT`.

    Raises:
        ValueError: if the number of panels is not 2 to 16, or the sentence contradicts it.
    """
    if not text.strip():
        raise ValueError("the sentence is empty; say what the images show")
    request = read_request(text) or SetRequest(None, text)
    count = count or request.count or DEFAULT_COUNT
    if not 2 <= count <= MAX_COUNT:
        raise ValueError(f"{excerpt(text)} asks for {count} images; a set has 2 to {MAX_COUNT} panels")

    # The subject and the listed items.
    subject, items = _items(request.content, request.count or count)
    if items and request.count is None:
        count = len(items)
    if items and len(items) != count:
        listed = ", ".join(map(excerpt, items))
        raise ValueError(f"{count} images are asked for, and {len(items)} are listed, {listed}; let both agree")
    theme = DANGLING.sub("", subject.strip(EDGES)).strip(EDGES)
    shown = VAGUE.sub("", theme)

    progress = PROGRESS.search(text) is not None
    note = ""
    if not items:
        items = _varied(VAGUE.search(theme), count, progress=progress)
        note = (
            "The text does not list what each panel shows, so panels differ by stage or view "
            "alone; list it (four images of a fox: it runs, it sleeps, …), or edit the panels"
        )
    # A generator of separate images reads each panel's text alone, so the subject is in every one.
    panels = tuple(f"{shown}, {item}" if shown else item for item in items)

    # Criteria for the judge.
    criteria = {"Style": {"Style": "All images share one style, palette and light."}}
    style = STYLE_ONLY.fullmatch(theme)
    if shown and not (style and (style["manner"] or all(map(OWN_SUBJECT.match, items)))):
        criteria["Identity"] = {"Subject": "The same subject appears in all images."}
    if progress:
        criteria["Logic"] = {"Progress": "The later image continues the earlier one."}
    return PanelDraft(theme or ", ".join(items), panels, criteria, note)


COUNT = rf"(?P<count>\d{{1,3}}|{'|'.join(NUMBERS[1:])})"
SEVERAL = r"(?:multiple|several|various|different|many|some|a\s+few)"
VERB = (
    r"(?:(?:please|can|could|would|will|you|i|i['’]d|we|let['’]s|like|love|want|need|to|see|have|get|generate|create|make|"
    r"draw|paint|design|produce|show|render|illustrate|give|me|us)[\s,]++){0,9}"
)
"""`Could you please draw me`, `I'd like to have`."""
ARTICLE = r"(?:(?:an?|the|one)\s++)?"
MEDIUM = "set|series|sequence|collection|sheet|storyboard|strip|collage|comic|manga"
SHOWN = rf"(?:an?|the|one|his|her|its|their|my|our|your|this|that)\s+(?:{MEDIUM})\b"
"""`reading a comic`: what an image shows, and no medium."""
BEFORE = rf"{ARTICLE}(?P<before>(?:(?!{SHOWN})[\w'’-]+,?\s+)*?)(?:(?P<medium>comic|manga)\s*)?"
"""`a clay owl comic`: words before the medium belong to the subject."""
STRIP = r"(?:storyboard|strip|collage|(?<=comic)|(?<=manga))"
COLLECTION = rf"{BEFORE}(?:set|series|sequence|collection|sheet|{STRIP})\s+of\s+"
OPENING = rf"\s{{0,9}}{VERB}(?:{COLLECTION})?(?:the\s+)?"
SUBJECT = r"(?-i:[a-z]+[^\Wsu]s)\s+\w+ing\b"
"""Plural noun and participle: `three friends taking photos` is one image."""
GAP = rf"(?P<adjectives>(?:(?!(?:of|in|on|at|with|for|and|the|an?)\b|{SUBJECT})[\w'’-]+\s+){{0,4}}?)"
PLURAL = r"(?:(?<=ss|.x|ch|sh|[^h]o)es|(?<!s)s)\b"
"""`sketches`, `heroes`, and `keyframes`, whose e is its own; `glass` is none."""
IES = re.compile(r"(?<!\bp)(?<!\bt)(?<!mov|ook|elf|omb|ood|oth|pix|gen|own)ie$")
"""A plural's `stud-ie-s`, whose singular is `study`; `movies`, `cookies`, `selfies` and the like keep theirs."""
VIEW = "image|picture|pic|panel|shot|scene|frame|still|view|variation|version|stage|step|phase|part"
"""Nouns that do not describe a panel: "four images of a fox" shows foxes, "four posters of a fox" shows posters."""
PICTURE = (
    rf"{VIEW}|photo|photograph|comic|drawing|illustration|painting|sketch|portrait|poster|mockup|logo|icon|sticker|"
    "render|banner"
)
REQUESTS = (
    # `Generate four drawings …`, `a series of 3 photos …`, `several images …`
    re.compile(rf"{OPENING}(?:{COUNT}|{SEVERAL})\s+{GAP}(?P<unit>{PICTURE}){PLURAL}", re.I),
    # `Images of …`
    re.compile(rf"{OPENING}(?P<unit>image|picture|panel|photo)s\b", re.I),
    # `A 2x2 grid of …`, `a 2x2 grid of images of …`
    re.compile(
        rf"{OPENING}(?:an?\s+)?(?P<count>\d{{1,2}}\s?[x×]\s?\d{{1,2}})\s+(?P<unit>grid)(?=\s+of\b|:)"
        r"(?:\s+of\s+(?:image|picture|panel)s\b)?",
        re.I,
    ),
    # `a 3-step guide`, `an owl in a four-panel comic`
    re.compile(
        rf"\s{{0,9}}(?:(?:develop|provide)\s)?{VERB}{ARTICLE}"
        rf"(?:(?P<subject>[^.!?:]*?)(?<!\ba)(?<!\ban)(?<!\bthe),?\s(?:(?:in|as)\s{ARTICLE})?)??"
        rf"{COUNT}[- ](?P<unit>step|stage|panel|part|phase|frame|image|scene|picture)\b",
        re.I,
    ),
    # `A comic strip with three panels`
    re.compile(
        rf"\s{{0,9}}{VERB}{BEFORE}{STRIP}\s+with\s+{COUNT}\s+(?P<unit>image|picture|panel|scene|frame)s\b", re.I
    ),
    # `A dentist in four scenes`
    re.compile(
        rf"\s*+{VERB}(?P<subject>.*?)\b(?:in|into|as|over|across)\s+{COUNT}\s+(?P<adjectives>(?:[\w-]+\s+)?)"
        r"(?P<unit>image|picture|panel|scene|stage|step|phase)s\b",
        re.I | re.S,
    ),
)
COUNTED = re.compile(rf"{OPENING}{COUNT}\s+{GAP}(?P<unit>[a-z][\w-]{{1,30}}?){PLURAL}", re.I)
"""`Three chalkboards …`: any plural, which asks for a set if the text lists as many."""
MARK = r"(?:(?<=\s)and\s+)?(?:^|(?<=\s))"
ENUMERATIONS = (
    # `1) it runs 2) it sleeps`
    re.compile(rf"{MARK}\(?(\d{{1,2}})[.)]\s+(?=\S)"),
    # `Panel 1: it runs. Panel 2: it sleeps.`
    re.compile(rf"{MARK}(?:image|picture|panel|photo|frame|scene)\s(\d{{1,2}}):\s+(?=\S)", re.I),
)
"""Marks of a numbered list."""
OF_THE_SET = re.compile(
    r"\b(?:coherent|consistent|matching|similar|related|different|distinct|separate|following)\s*", re.I
)
"""Adjectives that describe the set and not a panel."""
ADVERBIAL = re.compile(r"\s*(?:in(?!\swhich)|from|with|for|on|at|by)\s", re.I)
"""Content that describes the images before it: `images in watercolor`, `stills from a film`."""


def read_request(text: str) -> SetRequest | None:
    """Read the number of images in a request; None for a single image, or if the text contains panel tags."""
    if panel_texts(text):
        return None
    for pattern in REQUESTS:
        if match := pattern.match(text):
            return _request_of(text, match)

    # Any plural, if the text lists as many: "three chalkboards … featuring: 'Fresh Brew', …".
    match = COUNTED.match(text)
    request = match and _request_of(text, match)
    if request and request.count:
        _, items = _items(request.content, request.count, marks=FIRM_MARK)
        if len(items) == request.count:
            return request
    _, items = numbered_items(text)
    return SetRequest(len(items), text) if items else None


def numbered_items(text: str) -> tuple[str, list[str]]:
    """Split a text at its numbers into what precedes the first and the items; none unless they run 1, 2, …"""
    for mark in ENUMERATIONS:
        # `split` returns the number of an item before each item.
        subject, *pieces = mark.split(text)
        numbers = pieces[::2]
        if len(numbers) > 1 and numbers == [str(number + 1) for number in range(len(numbers))]:
            return subject, [item.strip(EDGES) for item in pieces[1::2]]
    return text, []


def _request_of(text: str, match: re.Match[str]) -> SetRequest | None:
    groups = dict.fromkeys(("count", "subject", "before", "medium", "adjectives"), "") | match.groupdict(default="")
    count = groups["count"].lower()
    number = None
    if count:
        sides = re.findall(r"\d+", count)
        number = math.prod(map(int, sides)) if sides else NUMBERS.index(count)
    if number == 1:
        return None

    # Words before the content that describe the panels: the adjectives, and a noun such as "menu".
    unit = IES.sub("y", (groups["medium"] or match["unit"]).lower())
    adjectives = OF_THE_SET.sub("", groups["before"] + groups["adjectives"]).strip()
    subject, rest = groups["subject"].rstrip(" ,;"), text[match.end() :]
    if subject and adjectives:
        subject += f" in {adjectives} {unit}s"
    elif not subject and (adjectives or not re.fullmatch(f"{VIEW}|grid", unit) or ADVERBIAL.match(rest)):
        subject = f"{adjectives} {unit} ".lstrip()
        rest = rest.strip()
    return SetRequest(number, subject + rest)


BEGINNING = re.compile(
    r"[^\w:]{0,9}(?:step[- ]by[- ]step\b[,\s]*)?"
    r"(?:(?:an?\s+)?(?:set|series|sequence|collection|strip|storyboard)\s+(?=of|about))?"
    r"(?:(?:of|depicting|showing|portraying|featuring|presenting|illustrating|about|in which|that show)\s+)?",
    re.I,
)
"""Words before the subject."""
LIST_MARK = re.compile(r"[:(—]|\b(?:showing|depicting|featuring|including|such as|namely)\b", re.I)
"""Opens a list."""
FIRM_MARK = re.compile(r"[:—]|\b(?:featuring|namely)\b", re.I)
"""Opens a list, and never a description."""
LABEL = re.compile(r"reading|saying|labelled|labeled|titled", re.I)
LIST_WORD = re.compile(rf"\b(?:{LABEL.pattern}|featuring|showing|including|with|such as|namely)$", re.I)
"""The last word before quotations."""
COMMA = re.compile(r"[,;]\s*(?:and\s)?")
COMMA_OR_AND = re.compile(r"[,;]\s*(?:and\s)?|\sand\s")
VAGUE = re.compile(
    rf",?\s(?:(?:in|with|from|at|for)\s+(?:{SEVERAL}|(?<!with\s)(?!one\b){COUNT})\s(?P<various>[^,;.]{{1,60}})"
    rf"|(?:(?:in|with|from|at|for)\s)?each\s(?:(?:{VIEW})\b.{{1,80}}|[^,;.]{{1,80}}))[.!?]?$",
    re.I,
)
"""`in various scenarios`, `in each season`: said of the set, and not of one panel; `with two horns` is of each."""
PROGRESS = re.compile(
    rf"\b(?:progress\w*|stages|steps|phases|growth|evolution|(?:{COUNT}|by)[- ](?:stage|step|phase))\b", re.I
)
"""`in four stages`, `a 4-step guide`, `step by step`; a singer *on stage* is in none."""
AT = r"(?:at|in|on|by|under|near|inside|behind|beside)\s"
VIEWS = ["seen from the front", "seen from the side", "in a close-up", "in a wide view"]
SCENES = ("preparing for it", "in the midst of it", "explaining it to somebody", "when it is done")
PLACE = re.compile(rf"(?P<subject>.*?)\s(?P<item>{AT}.*)", re.S)
"""`a fox at the beach`, if other items are places too."""
BEGUN = (
    # `the same dentist reading an X-ray, cleaning teeth`: the subject precedes the first action.
    re.compile(r"(?P<subject>.*?)(?<!['’]s)(?<!\ba)(?<!\ban)(?<!\bthe)\s(?P<item>\w+ing\b.*)", re.S),
    # `a logo for a bakery on a sign, a cup`: the preposition goes on.
    re.compile(
        r"(?P<subject>(?:[\w'’-]+\s){0,4}?(?:logo|icon|sticker|mockup|banner)\b.*)\s(?P<link>on\s)(?P<item>.*)", re.I
    ),
    # `image in watercolor of a fox, a bear`
    re.compile(rf"(?P<subject>(?:[\w'’-]+\s){{0,4}}?(?:{PICTURE})\b.*?)\s(?:of|for)\s(?P<item>.*)", re.I),
    # `the same woman as a doctor, a pilot`
    re.compile(r"(?P<subject>.*?)\s(?P<link>as\s)(?P<item>(?:an?|the)\s.*)", re.I),
)
"""The first item of a list whose beginning is the subject of all."""
SCENE = re.compile(r"(.*\b(?:scenario|scene|situation|task|moment|event))s", re.I)
"""Plural that becomes scenes: `medical scenarios`."""
MOMENTS = ("", ", a moment later", ", in other surroundings", ", at another time of day")
EDGES = " \n,;:.?!(—–-"
DANGLING = re.compile(r"(?:\s(?:about|of|with|from|in|for|by|and)|(?<=[.?!])\s+\w+)$", re.I)
"""Last word of a subject whose object was the list: `a film about`, `in one font. Show`."""
STYLE_ONLY = re.compile(
    rf"(?:[\w'’-]+\s){{0,4}}?(?:{PICTURE})"
    r"(?P<manner>\sin\s(?:(?:style|manner)\sof\b|(?!\b(?:of|with|about|for)\b).)+"
    r"|\swith\s(?:[\w'’-]+\s){0,3}(?:style|palette|colou?rs?|light|lighting|look|font|technique))?",
    re.I,
)
"""A subject that describes the images alone: `image in watercolor`, `poster with one palette`, `watercolor image`."""
OWN_SUBJECT = re.compile(r"(?:an?|the(?!\ssame))\s", re.I)
"""Begins an item that has a subject of its own: `a fjord`; `asleep` is said of the set's."""


def _varied(vague: re.Match[str] | None, count: int, *, progress: bool) -> list[str]:
    """Write panels that differ by stage, by the noun that the sentence varies ("various scenes"), or else by view."""
    if progress:
        states = ["just begun", *["further along"] * (count - 2), "finished"]
        return [f"stage {number} of {count}, {state}" for number, state in enumerate(states, 1)]
    various = (vague and vague["various"]) or ""
    scene = SCENE.fullmatch(various)
    if various and not scene:
        return [f"{various.removesuffix('s')} {number} of {count}" for number in range(1, count + 1)]
    ways = [f"in one {scene[1]}, {way}" for way in SCENES] if scene else VIEWS
    return [way + moment for moment in MOMENTS for way in ways][:count]


def _items(content: str, count: int, *, marks: re.Pattern[str] = LIST_MARK) -> tuple[str, list[str]]:
    """Split a request's content into its subject and the listed or quoted panels; none without a list.

    Args:
        marks: marks that open a list; by default a list of `count` items needs none.
    """
    content = BEGINNING.sub("", content, count=1)
    subject, items = numbered_items(content)
    if len(items) == count:
        return subject, items
    quotations = list(QUOTED.finditer(content))
    if len(quotations) < 2:
        return _listed(content, count, marks)

    subject = content[: quotations[0].start()].rstrip(EDGES)
    texts = ["".join(filter(None, quotation.groups())) for quotation in quotations]
    introduction = LIST_WORD.search(subject)
    word = introduction[0] if introduction else ""
    subject = subject.removesuffix(word)
    # Capitals and "reading" announce words written in the image; other quotations describe a panel.
    if LABEL.fullmatch(word) or all(text[0].isupper() for text in texts):
        texts = [f"{word or 'with'} '{text}'" for text in texts]
    return subject, texts


def _listed(content: str, count: int, marks: re.Pattern[str]) -> tuple[str, list[str]]:
    """Split off a list of `count` items from the subject; no items if there is no such list."""
    # A list behind a mark. Only the last five marks: each covers the rest of the text, so colons would cost minutes.
    for mark in reversed(list(marks.finditer(content))[-5:]):
        listed = content[mark.end() :]
        items = _split(COMMA, listed)
        if len(items) != count:
            items = _split(COMMA_OR_AND, listed)
        if len(items) == count or (mark[0] == ":" and len(items) > 1):
            return content[: mark.start()], items
    if marks is FIRM_MARK or "," not in content:
        return content, []
    return _unmarked(content, count)


def _unmarked(content: str, count: int) -> tuple[str, list[str]]:
    """Split off a list of `count` items that no mark opens from its subject; no items if there is no such list."""
    # "one fox, at rest and at play", "a fox, a bear and an owl".
    items = _split(COMMA_OR_AND, content)
    if len(items) == count + 1:
        return items[0], items[1:]
    if len(items) != count:
        return content, []
    first, *later_items = items
    patterns = BEGUN
    if any(re.match(AT, item) for item in later_items) and not any(map(OWN_SUBJECT.match, later_items)):
        patterns = (PLACE, *BEGUN[1:])
    for pattern in patterns:
        if match := pattern.match(first):
            link = match.groupdict().get("link", "")
            return match["subject"], [f"{link}{item.removeprefix(link)}" for item in (match["item"], *later_items)]
    return "", items


def _split(separator: re.Pattern[str], text: str) -> list[str]:
    items = []
    for part in separator.split(text.strip(" .)")):
        item = part.strip(EDGES)
        if item:
            items.append(item)
    return items
