"""HTTP API and page of the studio (`pacorl studio`).

Every address but the page requires the token, as a cookie or as `Authorization: Bearer`. Sets are written into the
history's folder, uploads stay in memory, and the page loads no content from other servers.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from PIL.Image import Image
from pydantic import Field

from pacorl.config.options import TEMPLATE, StudioModels
from pacorl.core.grid import parse_layout, split
from pacorl.generate.language_writers import open_writer
from pacorl.io.documents import parse_json
from pacorl.io.files import safe_name
from pacorl.io.images import MAX_PIXELS as MAX_JUDGED_PIXELS
from pacorl.io.images import open_image, png_bytes
from pacorl.judge.calibration import read_calibration, threshold
from pacorl.records.compose import layout_for
from pacorl.records.panels import write_panels
from pacorl.studio import model_choice, models
from pacorl.studio.characters import Characters, offers_for_characters, picture_bytes
from pacorl.studio.history import MAX_SETS, History
from pacorl.studio.jobs import CancelledError, Job, JobQueue, Work
from pacorl.studio.model_choice import Downloads
from pacorl.studio.models import MAX_BYTES, MAX_IMAGES, MAX_PIXELS, PRACTICE_JUDGE, ModelHost, Sampling, Upload, Uploads
from pacorl.studio.trainer_process import TrainerProcess, loras_in, sample_image
from pacorl.types import TINY, Grid, Size
from pacorl.web import forms
from pacorl.web.forms import Form, JsonRoute
from pacorl.web.guard import RefusedError
from pacorl.web.site import Session, Site, error_response, listening, run

PAGE = Path(__file__).parent / "page"
MAX_CANDIDATES = 50
MAX_SIDE = 4096
MAX_SCENES = 64
MAX_LORAS = 4
MAX_SHEET = 8
"""Most pictures of a character's sheet."""
MAX_TRIES = 20
"""Most redrawn panels of a repair; their images stay in memory."""

LIMITS = {
    "bytes": MAX_BYTES,
    "pixels": MAX_PIXELS,
    "images": MAX_IMAGES,
    "candidates": MAX_CANDIDATES,
    "sets": MAX_SETS,
}
"""Limits that the page shows before a request is refused."""

GUIDANCE = ("guidance_scale", "true_cfg_scale", "negative_prompt")
"""Options of a kind that a request may set."""

Text = Annotated[forms.Text, Field(max_length=4000)]
Name = Annotated[forms.Text, Field(min_length=1, max_length=200)]
Strength = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Guidance = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None
Layout = Annotated[forms.Text, Field(max_length=9)]


class AppState:
    """Objects that the endpoints share."""

    def __init__(
        self,
        token: str,
        names: StudioModels | None = None,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            token: of the owner's link.
            names: checkpoints of the generator and the judge.
            folder: of the history and of the trained characters. Without a folder they end with the studio.
        """
        self.token = token
        self.names = names or StudioModels()
        self.calibration = read_calibration(self.names.calibration or "")
        self.temporary = None if folder else tempfile.TemporaryDirectory(prefix="pacorl-history-")
        folder = folder or Path(self.temporary.name)  # type: ignore[union-attr]

        self.history = History(folder)
        self.trainer = TrainerProcess()
        self.characters = Characters(folder, self.names, trainer=self.trainer)
        self.downloads = Downloads(folder / "download.txt")
        self.started_with = self.names
        """Models of the command, which may be paths."""
        self.uploads = Uploads()
        self.jobs = JobQueue()
        self.host = ModelHost(self.names)
        # In the background: the page opens while the weights load.
        self.loading = self.jobs.submit("load", self.host.load)
        self.site = Site("pacorl studio", PAGE, "pacorl_studio", self._sign_in, ("/api/uploads",), MAX_BYTES)

    def close(self) -> None:
        """End the jobs and the training, and delete a temporary history."""
        self.trainer.stop()
        self.downloads.stop()
        # Jobs end before the models and the history that they use.
        self.jobs.close()
        self.host.close()
        self.history.close()
        if self.temporary:
            self.temporary.cleanup()

    def choose(self, names: StudioModels) -> Job:
        """Take other models from now on, and queue their loading."""
        self.loading = self.jobs.submit("load", lambda job: self.host.choose(job, names))
        self.names = self.characters.names = names
        return self.loading

    def loras(self) -> dict[str, str]:
        """Map the names of the LoRAs that were trained here, or that the command named, to their sources."""
        return loras_in(self.history.folder) | {source: source for source in self.started_with.strengths}

    def is_owner(self, token: str) -> bool:
        """Compare a token with the owner's, in constant time: a shorter time would show how much of it is right."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def _sign_in(self, token: str) -> Session:
        if not self.is_owner(token):
            raise RefusedError("this link is not, or no longer, the studio's; use the one that it printed", status=401)
        return Session()


router = APIRouter(route_class=JsonRoute)


def serve(
    names: StudioModels,
    *,
    history: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8767,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM; port 0 takes a free port, and without a `history` sets end with the studio.

    Raises:
        OSError: if the port is taken.
        ValueError: if another studio has that history, or a calibration file is damaged.
    """
    # uvicorn raises a signal again once it has shut down, and SIGTERM's default would end the process before `close`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    with listening(host, port) as (listener, url):
        state = AppState(secrets.token_urlsafe(16), names, history)
        announce(f"studio: {url}/join#{state.token}")
        try:
            run(make_app(state), sockets=[listener])
        finally:
            state.close()


def make_app(state: AppState) -> FastAPI:
    """Build the application of one studio."""
    app = state.site.app(router, state=state)
    # Prompts, sizes and images of users raise ValueError with one line for them, wherever they are checked.
    app.add_exception_handler(ValueError, lambda request, error: error_response(error))
    # A full disk, or a folder or a pipe in the place of a file.
    app.add_exception_handler(OSError, lambda request, error: error_response(error))
    return app


def _owned_state(request: Request) -> AppState:
    state: AppState = request.app.state.shared
    if not state.is_owner(state.site.token(request)):
        raise RefusedError("open the page by the link that the command printed", status=401)
    return state


def _browser(request: Request) -> str:
    state: AppState = request.app.state.shared
    return state.site.browser(request)


State = Annotated[AppState, Depends(_owned_state)]
Browser = Annotated[str, Depends(_browser)]
"""Id of a browser. Uploads and jobs of a browser are hidden from the owner's other browsers."""


# --- state -----------------------------------------------------------------------------------------------------


@router.get("/api/state")
def page_state(state: State, browser: Browser) -> dict[str, Any]:
    """Describe everything that the page draws, after a reload too."""
    names = state.names
    latest = {kind: state.jobs.latest(kind, owner=browser) for kind in ("set", "judgement", "sheet")}
    return {
        "model": names.model,
        "editor": models.editor_of(names),
        "loras": _shown_loras(state),
        "options": _option_names(names, edits=False),
        "edit_options": _option_names(names, edits=True),
        "judge": names.judge_model or names.judge,
        "tiny": {"model": names.model == TINY, "judge": names.judge == TINY},
        "calibrated": state.calibration is not None,
        "words": models.words(names),
        "instructions": models.instructions(names),
        "example": models.example(names, 0),
        "sheet": models.sheet_example(names),
        # While a LoRA is taught the models are unloaded; the next job loads them again.
        "ready": state.loading.status == "done",
        "teaching": state.trainer.busy_with,
        "cannot": state.host.modes,
        "fault": state.loading.error,
        "latest": {kind: job.id for kind, job in latest.items() if job},
        "uploads": _upload_dicts(state, browser),
        "limits": LIMITS,
    }


def _shown_loras(state: AppState) -> dict[str, float]:
    """Map each LoRA in use, by its name on the page, to its strength."""
    names = {source: name for name, source in state.loras().items()}
    return {names.get(source, source): strength for source, strength in state.names.strengths.items()}


def _option_names(names: StudioModels, *, edits: bool) -> list[str]:
    """List the guidance options of the generator, or of the editor."""
    spec = models.spec_of(names)
    if edits and not spec.edits:
        spec = models.spec_of(replace(names, model=models.editor_of(names), kind=""))
    return [name for name in GUIDANCE if name in spec.options.model_fields]


@router.get("/api/example")
def give_example(state: State, number: int = 0) -> dict[str, Any]:
    """Return example words for the forms."""
    return models.example(state.names, number)


@router.get("/api/jobs/{name}")
def job_state(name: str, state: State, browser: Browser) -> dict[str, Any]:
    """Return a job's progress and result, and the number of jobs ahead of it."""
    job = _job(state, name, browser)
    ahead: list[Job] = []
    if job.status == "queued":
        for other in state.jobs.unfinished:
            if int(other.id) < int(job.id):
                ahead.append(other)
    waiting_for = ahead[0].phase or ahead[0].kind if ahead else ""
    return {**job.to_dict(), "ahead": len(ahead), "waiting_for": waiting_for}


@router.delete("/api/jobs/{name}")
def cancel(name: str, state: State, browser: Browser) -> dict[str, Any]:
    """Cancel a job. Loading goes on."""
    job = _job(state, name, browser)
    # Every later job needs the models.
    if job.kind != "load":
        state.jobs.cancel(job)
    return job.to_dict()


def _job(state: AppState, name: str, browser: str) -> Job:
    job = state.jobs.find(name)
    if job is None or job.owner != browser:
        raise RefusedError(f"there is no job {name[:20]!r}; old jobs are forgotten", status=404)
    return job


@router.get("/images/{name}/{file}.png")
def image(name: str, file: str, state: State, browser: Browser) -> Response:
    """Return an image of a job."""
    return _png(_job(state, name, browser).images.get(file))


# --- making ----------------------------------------------------------------------------------------------------


class SentenceForm(Form):
    text: Text


@router.post("/api/panels")
def write_set(form: SentenceForm, state: State) -> dict[str, Any]:
    """Write the theme and panels of a sentence, which a person may edit before they are generated."""
    draft = asdict(write_panels(form.text, writer=open_writer(state.names.writer, state.names.writer_model)))
    cast = {}
    for character in state.characters.summaries():
        for name in (character["name"], character["name"].replace("_", " ")):
            cast[name] = character["description"]
    theme = models.with_descriptions(draft["theme"], cast)
    panels = [models.with_descriptions(text, cast) for text in draft["panels"]]
    # What Generate would refuse is said at once; the fields are filled all the same.
    fault = ""
    try:
        models.prompt_for(state.names, theme, panels, None)
    except ValueError as refused:
        fault = str(refused)
    return draft | {"theme": theme, "panels": panels, "fault": fault}


class SamplingForm(Form):
    """Fields of every request that generates images."""

    candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 4
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    steps: Annotated[int, Field(ge=1, le=200)] | None = None
    size: Annotated[forms.Text, Field(max_length=11)] = ""
    lora_scale: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    compare: bool = True
    guidance_scale: Guidance = None
    true_cfg_scale: Guidance = None
    negative_prompt: Text = ""

    def sampling(self, adapter: object) -> Sampling:
        """Check and convert the fields. Raises ValueError for a malformed or large size, or a strength without LoRA."""
        size = Size.parse(self.size) if self.size.strip() else None
        if size and max(size.height, size.width) > MAX_SIDE:
            raise ValueError(f"an image of {self.size} pixels is too large; each side may have {MAX_SIDE}")
        if self.lora_scale != 1 and not adapter:
            raise ValueError("LoRA strength has no LoRA to act on; choose one under Models")
        options = {}
        for name in GUIDANCE:
            # An empty field is the checkpoint's default, and not an empty negative prompt.
            if getattr(self, name) not in (None, ""):
                options[name] = getattr(self, name)
        return Sampling(
            candidates=self.candidates,
            seed=self.seed,
            size=size,
            steps=self.steps,
            lora_scale=self.lora_scale,
            compare=self.compare and bool(adapter) and self.lora_scale != 0,
            options=options,
        )


class SetForm(SamplingForm):
    theme: Text
    panels: Annotated[list[Text], Field(max_length=16)]
    layout: Layout = ""
    character: Text = ""
    """Name of a character of the studio, whose pictures a generator with references reads."""


@router.post("/api/sets")
def make_set(form: SetForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue a set. Words that the model does not know are refused at once."""
    _check_mode(state, "set")
    prompt = models.prompt_for(state.names, form.theme, form.panels, _grid(form.layout))
    most = models.spec_of(state.names).policy.max_references
    if form.character and most:
        character = state.characters.find(form.character)
        prompt = replace(prompt, characters=(character,), references=character.images[:most])
    sampling = form.sampling(state.names.strengths)
    return _make(state, browser, form, lambda job: state.host.make_set(job, prompt, sampling))


class EditForm(SamplingForm):
    instruction: Text
    sources: Annotated[list[Text], Field(min_length=1, max_length=MAX_IMAGES)]


@router.post("/api/edits")
def make_edit(form: EditForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue an edit of uploads."""
    _check_mode(state, "edit")
    prompt = models.edit_prompt(state.names, form.instruction)
    sampling = form.sampling(state.names.strengths)
    sources = _uploads_to_open(state, form.sources, browser)
    return _make(state, browser, form, lambda job: state.host.make_set(job, prompt, sampling, sources=sources))


class StoryboardForm(SamplingForm):
    title: Text
    style: Text = ""
    layout: Layout = "2x2"
    characters: dict[Text, Text] = Field({}, max_length=12)
    scenes: Annotated[list[Text], Field(max_length=MAX_SCENES)]


@router.post("/api/storyboards")
def make_storyboard(form: StoryboardForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue the pages of a storyboard."""
    sampling = form.sampling(state.names.strengths)
    document = form.model_dump(include={"title", "style", "layout", "characters", "scenes"})
    board = models.board_for(state.names, document)
    return _make(state, browser, form, lambda job: state.host.make_storyboard(job, board, sampling))


def _check_mode(state: AppState, mode: str) -> None:
    reason = state.host.modes.get(mode)
    if reason:
        raise ValueError(reason)


def _make(
    state: AppState, browser: str, form: SamplingForm, work: Work, *, kind: str = "set", replaces: str = ""
) -> dict[str, Any]:
    """Queue work whose result is a set, which is added to the history, in place of a set that it contains."""
    state.trainer.check_idle()

    def make(job: Job) -> dict[str, Any]:
        document = {**work(job), "asked": form.model_dump()}
        try:
            name = state.history.add(document, job.images)
        except OSError as error:  # the set took minutes, so it is shown all the same
            return {**document, "note": f"This set is not in the history: {error.strerror or error}."}
        if replaces:
            state.history.replace(replaces, name)
        job.images = {}
        return _with_address(document, name)

    return state.jobs.submit(kind, make, owner=browser).to_dict()


# --- the history -----------------------------------------------------------------------------------------------


@router.get("/api/history")
def history(state: State) -> list[dict[str, Any]]:
    """List the sets of the history."""
    return state.history.summaries()


@router.get("/api/history/{name}")
def earlier_set(name: str, state: State) -> dict[str, Any]:
    """Return one set of the history."""
    document = state.history.read(name)
    if document is None:
        raise RefusedError(f"there is no set {name[:20]!r} any more; the history keeps the newest", status=404)
    return _with_address(document, name)


def _with_address(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {**document, "id": name, "images": f"/sets/{name}"}


@router.delete("/api/history/{name}")
def forget_set(name: str, state: State) -> list[dict[str, Any]]:
    """Remove a set, and list the remaining sets."""
    state.history.remove(name)
    return state.history.summaries()


class FavouriteForm(Form):
    favourite: bool


@router.post("/api/history/{name}")
def mark_set(name: str, form: FavouriteForm, state: State) -> list[dict[str, Any]]:
    """Make a set a favourite, or a usual one again, and list all sets."""
    state.history.mark(name, favourite=form.favourite)
    return state.history.summaries()


class PanelForm(Form):
    candidate: Annotated[int, Field(ge=0)] = 0
    panel: Annotated[int, Field(ge=0)]
    """Panel of that candidate, counted from 0."""


@router.post("/api/history/{name}/panels")
def redraw_panel(name: str, form: PanelForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue another drawing of one panel of a made page; the new page is a set beside the page before."""
    _check_mode(state, "set")
    document, candidate, page = _candidate(state, name, form.candidate)
    recipe = candidate["recipe"]
    texts = parse_json(recipe.get("panels", "[]"), name="the recipe of the page")
    if form.panel >= len(texts):
        raise RefusedError(f"set {name[:20]} has {len(texts)} panels", status=404)

    # What the page was asked for, with a seed that no page has used.
    asked = {"theme": recipe.get("theme", ""), "panels": candidate["panels"], "layout": candidate["layout"]}
    asked |= {key: value for key, value in document["asked"].items() if key in SetForm.model_fields}
    request = SetForm(**asked)
    sampling = replace(request.sampling(state.names.strengths), candidates=1, seed=secrets.randbelow(2**31))
    most = models.spec_of(state.names).policy.max_references
    references = state.characters.find(request.character).images if request.character and most else ()
    (prompt,) = models.panel_prompts(
        state.names, [texts[form.panel]], theme=recipe.get("theme", ""), references=references
    )

    def work(job: Job) -> dict[str, Any]:
        result = state.host.redraw_panel(job, candidate, page, panel=form.panel, prompt=prompt, sampling=sampling)
        before, now = (one["score"] for one in (candidate, result["candidates"][0]))
        scores = "" if None in (before, now) else f" The page has {now:.2f}, and had {before:.2f} before."
        note = f"Panel {form.panel + 1} was drawn again.{scores} The page before is in the history."
        return {**result, "theme": document["theme"], "note": note}

    return _make(state, browser, request, work)


@router.get("/sets/{name}/{file}.png")
def set_image(name: str, file: str, state: State) -> Response:
    """Return an image of a set."""
    return _png(state.history.image(name, file))


@router.get("/sheets/{name}.png")
def sheet_image(name: str, image: Annotated[list[str], Query(max_length=MAX_SHEET)], state: State) -> Response:
    """Return pictures of a sheet as one image, at the size of the original, which comes first."""
    pictures = []
    original = ["source-1"] if state.history.image(name, "source-1") else []
    for picture in [*original, *image]:
        content = state.history.image(name, picture)
        if content is None:
            raise RefusedError("there is no such image", status=404)
        pictures.append(open_image(content, name=f"picture {picture[:20]} of sheet {name[:20]}"))
    return _png(png_bytes(models.page_of(pictures, None)))


@router.get("/sheets/of/{name}.png")
def own_sheet(name: str, state: State) -> Response:
    """Return the first pictures of a character as one image."""
    pictures = [open_image(path) for path in state.characters.find(name).images[: MAX_SHEET + 1]]
    response = _png(png_bytes(models.page_of(pictures, None)))
    response.headers["Cache-Control"] = "no-store"  # pictures are added and removed
    return response


@router.get("/sets/{name}/{number}.zip")
def export(name: str, number: int, state: State) -> Response:
    """Return a candidate, counted from 0, with its recipe."""
    content = state.history.export(name, number)
    if content is None:
        raise RefusedError(f"there is no candidate {number} of a set {name[:20]!r}", status=404)
    disposition = f'attachment; filename="pacorl-set-{name}-{number + 1}.zip"'
    return Response(content, media_type="application/zip", headers={"Content-Disposition": disposition})


def _png(content: bytes | None) -> Response:
    if content is None:
        raise RefusedError("there is no such image", status=404)
    # An image never changes under its name, and a reloaded page shows all of them.
    return Response(content, media_type="image/png", headers={"Cache-Control": "private, max-age=86400"})


def _grid(text: str) -> Grid | None:
    if text.strip():
        return parse_layout(text)
    return None


# --- models ----------------------------------------------------------------------------------------------------


@router.get("/api/models")
def list_models(state: State) -> dict[str, Any]:
    """List the models that can be chosen, the choice of now, and the download."""
    names = state.names
    chosen = {name: getattr(names, name) for name in ("model", "judge", "memory", "writer")}
    return {
        "offers": offers_for_characters(model_choice.offers(state.started_with)),
        "writers": list(dict.fromkeys([TEMPLATE, state.started_with.writer])),
        "loras": list(state.loras()),
        "chosen": chosen | {"editor": models.editor_of(names), "loras": _shown_loras(state)},
        "download": state.downloads.state(),
        "free": model_choice.free_bytes(),
    }


class ModelsForm(Form):
    model: Name
    editor: Text = ""
    judge: Name = TINY
    memory: Literal["auto", "normal", "low", "lowest"] = "auto"
    writer: Name = TEMPLATE
    loras: dict[Name, Strength] = Field({}, max_length=MAX_LORAS)
    check: bool = False
    """Whether the choice is only checked."""


@router.post("/api/models")
def choose_models(form: ModelsForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue the memory check of a choice, or load it in place of the former one if the memory suffices."""
    names = _named(form, state)

    def check(job: Job) -> dict[str, Any]:
        job.enter("Checking the memory")
        fit = model_choice.fit_of(names, names.model)
        return asdict(fit) | {"fits": fit.fits}

    if form.check:
        return state.jobs.submit("fit", check, owner=browser).to_dict()
    state.trainer.check_idle()
    # A load would download an absent model, whose licence nobody has accepted.
    for name in {names.model, names.editor, names.judge} - _known(state.started_with):
        model_choice.check_cached(name)
    if names.model != TINY and names.judge == TINY:
        raise ValueError(f"{PRACTICE_JUDGE}; choose a judge for {names.model} too")
    return state.choose(names).to_dict()


def _known(started: StudioModels) -> set[str]:
    """Models that need no download: embedded, or of the command."""
    return {"", TINY, started.model, started.editor, started.judge}


def _named(form: ModelsForm, state: AppState) -> StudioModels:
    """Check the names of a choice: the page names no path of this machine."""
    started = state.started_with
    for name in (form.model, form.editor, form.judge):
        model_choice.check_name(name, _known(started))
    if form.writer not in (TEMPLATE, started.writer):
        raise ValueError(f"{form.writer[:80]!r} is no model of the list; another writer is given by --writer")
    trained = state.loras()
    loras = {}
    for name, strength in form.loras.items():
        loras[trained.get(name) or model_choice.check_name(name)] = strength
    kind = started.kind if form.model == started.model else ""
    changes = form.model_dump(exclude={"loras", "check"}) | {"kind": kind, "adapter": "", "loras": loras}
    return replace(state.names, **changes)


class DownloadForm(Form):
    model: Name
    accepted: bool = False
    """Whether the person has accepted the model's licence."""
    token: Annotated[forms.Text, Field(max_length=200, pattern=r"^[A-Za-z0-9_-]*$")] = ""
    """Access token of the hub, for this download only."""


@router.post("/api/downloads")
def download(form: DownloadForm, state: State) -> dict[str, Any]:
    """Start a download; a published model's licence must be accepted first."""
    name = model_choice.check_name(form.model)
    licences = {offer.name: offer.licence for offer in model_choice.offers(state.started_with)}
    if not form.accepted:
        licence = licences.get(name) or "its own"
        raise RefusedError(
            f"{name} has the licence {licence}; read it at huggingface.co/{name}, and accept it", status=409
        )
    state.downloads.start(name, token=form.token)
    return {"download": state.downloads.state()}


@router.delete("/api/downloads")
def stop_download(state: State) -> dict[str, Any]:
    """Stop the download; it goes on later where it stopped."""
    state.downloads.stop()
    return {"download": state.downloads.state()}


# --- characters ------------------------------------------------------------------------------------------------


@router.get("/api/characters")
def list_characters(state: State) -> list[dict[str, Any]]:
    """Describe all characters with their pictures and trainings."""
    return state.characters.summaries()


class CharacterForm(Form):
    description: Text
    uploads: list[Text] = Field([], max_length=MAX_IMAGES)
    sheet: list[Text] = Field([], max_length=MAX_SHEET)
    """Images of the set `of`, to become pictures of the character."""
    of: Text = ""
    candidate: Annotated[int, Field(ge=0)] = 0
    panels: list[int] = Field([], max_length=MAX_IMAGES)
    """Panels of that candidate of the set `of`, counted from 0, to become pictures too."""
    is_new: bool = False
    """Whether a character of this name is refused, instead of changed."""
    captions: dict[Text, Text] = Field({}, max_length=99)
    removed: list[Text] = Field([], max_length=99)


@router.post("/api/characters/{name}")
def save_character(name: str, form: CharacterForm, state: State, browser: Browser) -> dict[str, Any]:
    """Create a character, or change its description, captions and pictures."""
    name = state.characters.folder_name(name, is_new=form.is_new)
    # Pictures of a sheet, whose captions are their lines.
    added = []
    lines = []
    sheet = _sheet(state, form.of) if form.sheet else {}
    for image in form.sheet:
        content = state.history.image(form.of, image)
        if content is None:
            raise RefusedError(f"there is no picture {image[:20]!r} of a sheet {form.of[:20]!r}", status=404)
        added.append(content)
        for candidate in sheet["candidates"]:
            if candidate["image"] == image:
                lines.append(sheet["asked"]["scenes"][candidate["picture"]])
    if form.panels:
        for panel, line in _panels_of(state, form):
            added.append(png_bytes(panel))
            lines.append(line)
    # Uploads, written again from their pixels: no foreign file reaches the folder.
    for upload in dict.fromkeys(form.uploads):
        added.append(picture_bytes(_upload(state, upload, browser).open()))
    state.characters.save(
        name,
        form.description,
        added=added,
        added_captions=lines,
        captions=form.captions,
        removed=form.removed,
    )
    # Last, so that a refused change leaves the uploads on the page.
    for upload in form.uploads:
        state.uploads.remove(upload, owner=browser)
    return state.characters.describe(name)


def _panels_of(state: AppState, form: CharacterForm) -> list[tuple[Image, str]]:
    """Cut panels out of a made page, each with its line."""
    _, candidate, page = _candidate(state, form.of, form.candidate)
    panels = split(page, parse_layout(candidate["layout"]))
    if not all(0 <= number < min(len(panels), len(candidate["panels"])) for number in form.panels):
        raise RefusedError(f"set {form.of[:20]} has {len(panels)} panels", status=404)
    return [(panels[number], candidate["panels"][number]) for number in form.panels]


def _candidate(state: AppState, name: str, number: int) -> tuple[dict[str, Any], dict[str, Any], Image]:
    """Read a candidate of a set: the set's document, the candidate in it, and its image."""
    document = state.history.read(name)
    if document is None or number >= len(document["candidates"]):
        raise RefusedError(f"there is no candidate {number} of a set {name[:20]!r}", status=404)
    candidate = document["candidates"][number]
    content = state.history.image(name, candidate["image"]) or b""
    return document, candidate, open_image(content, name=f"set {name}")


class FirstForm(Form):
    picture: Text


@router.post("/api/characters/{name}/first")
def make_first(name: str, form: FirstForm, state: State) -> dict[str, Any]:
    """Make a picture of a character its first one."""
    state.characters.make_first(name, form.picture)
    return state.characters.describe(name)


@router.delete("/api/characters/{name}")
def remove_character(name: str, state: State) -> list[dict[str, Any]]:
    """Delete a character's pictures; its LoRAs stay."""
    state.characters.remove(name)
    return state.characters.summaries()


@router.get("/characters/{name}/{picture}")
def character_picture(name: str, picture: str, state: State) -> Response:
    """Return a picture of a character."""
    # Not kept by the browser: the number of a removed picture may become that of another one.
    return Response(state.characters.image(name, picture), media_type="image/png")


@router.post("/api/characters/{name}/captions")
def write_captions(name: str, state: State, browser: Browser) -> dict[str, Any]:
    """Queue captions of the pictures without one, in the judge's words."""
    state.trainer.check_idle()
    if state.names.judge == TINY:
        raise ValueError("the practice judge answers Yes or No only; choose a real one under Models")
    pictures = state.characters.uncaptioned(name)

    def work(job: Job) -> dict[str, Any]:
        captions = state.host.describe(job, pictures)
        # Captions that a person wrote meanwhile stay.
        left = {path.name for path in state.characters.uncaptioned(name)}
        added = {picture: caption for picture, caption in captions.items() if picture in left}
        description = state.characters.describe(name)["description"]
        state.characters.save(name, description, added=[], captions=added, removed=[])
        return {"captions": len(added)}

    return state.jobs.submit("captions", work, owner=browser).to_dict()


class SheetForm(SamplingForm):
    scenes: Annotated[list[Text], Field(min_length=1, max_length=MAX_SHEET)]
    again: Text = ""
    """The sheet of which one picture is drawn again, with new seeds."""
    picture: Annotated[int, Field(ge=0, lt=MAX_SHEET)] = 0
    """Position of that picture."""


@router.post("/api/characters/{name}/sheet")
def make_sheet(name: str, form: SheetForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue a sheet: pictures of a character by the editor, or one picture of a sheet again."""
    _check_mode(state, "edit")
    prompts = {number: models.edit_prompt(state.names, scene) for number, scene in enumerate(form.scenes)}
    sampling = form.sampling(state.names.strengths)
    sources = state.characters.find(name).images
    # All that was drawn for an earlier sheet stays, to choose from.
    earlier: list[dict[str, Any]] = []
    if form.again:
        sheet = _sheet(state, form.again)
        if form.picture not in prompts:
            raise RefusedError(f"there is no picture {form.picture} of a sheet {form.again[:20]!r}", status=404)
        prompts = {form.picture: prompts[form.picture]}
        earlier = sheet["candidates"]
        # Behind all earlier seeds, which would draw the same pictures again.
        sampling = replace(sampling, seed=max(candidate["seed"] for candidate in sheet["candidates"]) + 1)

    def make(job: Job) -> dict[str, Any]:
        if form.again:
            _sheet(state, form.again)  # another browser may have drawn it again meanwhile
        for candidate in earlier:
            job.images[candidate["image"]] = state.history.image(form.again, candidate["image"]) or b""
        result = state.host.make_sheet(job, prompts, sampling, sources=sources, earlier=earlier)
        return {**result, "theme": name}

    return _make(state, browser, form, make, kind="sheet", replaces=form.again)


def _sheet(state: AppState, name: str) -> dict[str, Any]:
    sheet = state.history.read(name)
    if sheet is None or sheet["kind"] != "sheet":
        raise RefusedError(f"there is no sheet {name[:20]!r}", status=404)
    return sheet


class TrainForm(Form):
    steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    resume: Text = ""
    """A training that goes on, in place of a new one."""


@router.post("/api/characters/{name}/train")
def train(name: str, form: TrainForm, state: State) -> dict[str, Any]:
    """Start the training of a character's LoRA, or let one go on."""
    state.trainer.check_idle()
    training = form.resume
    if training:
        state.characters.resume(training)
    else:
        training = state.characters.prepare(name, steps=form.steps)
    _launch(state, lambda: state.characters.launch(training))
    return state.characters.describe(name)


def _launch(state: AppState, launch: Callable[[], None]) -> None:
    """Queue the launch of an announced run."""

    def unload_and_launch(job: Job) -> dict[str, Any]:
        with state.trainer.reservation():
            state.host.unload()  # two generators would not fit most cards
            launch()
        return {}

    with state.trainer.reservation():
        state.jobs.submit("train", unload_and_launch)


@router.post("/api/characters/{name}/stop")
def stop_training(name: str, state: State) -> dict[str, Any]:
    """Stop the training that is under way."""
    state.trainer.stop()
    return state.characters.describe(name)


@router.get("/loras/{name}/{when}-{number}.png")
def lora_sample(name: str, when: Literal["before", "after"], number: int, state: State) -> Response:
    """Return an image of a training's first or newest evaluation."""
    response = _png(sample_image(state.history.folder / "loras" / safe_name(name) / "run", when, number))
    response.headers["Cache-Control"] = "no-store"  # the newest evaluation changes
    return response


# --- judging ---------------------------------------------------------------------------------------------------


@router.post("/api/uploads")
async def upload(request: Request, state: State, browser: Browser, name: str = "image") -> dict[str, Any]:
    """Keep the bytes of one image. Unsuitable images are refused by name."""
    return _upload_dict(await state.uploads.add(await request.body(), name, owner=browser))


def _upload_dict(uploaded: Upload) -> dict[str, Any]:
    width, height = uploaded.size
    address = f"/uploads/{uploaded.id}"
    return {"id": uploaded.id, "name": uploaded.name, "width": width, "height": height, "image": address}


def _upload_dicts(state: AppState, browser: str) -> list[dict[str, Any]]:
    return [_upload_dict(uploaded) for uploaded in state.uploads.of(browser)]


def _upload(state: AppState, name: str, browser: str) -> Upload:
    uploaded = state.uploads.find(name, owner=browser)
    if uploaded is None:
        raise RefusedError(f"there is no image {name[:20]!r}; hand it in again", status=404)
    return uploaded


def _uploads_to_open(state: AppState, names: Sequence[str], browser: str) -> list[Upload]:
    """Find the images of a job, which opens all of them at a time. Raises ValueError for too many pixels."""
    uploads = []
    for name in names:
        uploads.append(_upload(state, name, browser))
    pixels = sum(math.prod(upload.size) for upload in uploads)
    if pixels > MAX_JUDGED_PIXELS:
        raise ValueError(
            f"the images have {pixels:,} pixels together; at most {MAX_JUDGED_PIXELS:,} are judged or "
            "changed, so add smaller ones"
        )
    return uploads


@router.get("/uploads/{name}")
def preview(name: str, state: State, browser: Browser) -> Response:
    """Return a small image of an upload."""
    return Response(_upload(state, name, browser).preview, media_type="image/png")


@router.delete("/api/uploads/{name}")
def take_back(name: str, state: State, browser: Browser) -> dict[str, Any]:
    """Remove an upload, and list the remaining uploads."""
    state.uploads.remove(name, owner=browser)
    return {"uploads": _upload_dicts(state, browser)}


class JudgeForm(Form):
    uploads: Annotated[list[Text], Field(max_length=MAX_IMAGES)]
    theme: Text = ""
    shared: Text = ""
    """The theme of a made page with the words about its layout, as its ranking asked; `theme` if it is empty."""
    criteria: list[Text] = Field([], max_length=12)
    layout: Layout = ""
    symmetric: bool = False


@router.post("/api/judgements")
def judge(form: JudgeForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue a judgement of several images, or of one grid image that is cut into panels."""
    uploads, options = _asked(form, state, browser)
    work = partial(state.host.judge, uploads=uploads, **options)
    return state.jobs.submit("judgement", work, owner=browser).to_dict()


class CheckForm(JudgeForm):
    least: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Threshold of an image's score; None for the calibration's."""


@router.post("/api/checks")
def check(form: CheckForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue the check of a set."""
    return _check(form, state, browser)


class RepairForm(CheckForm):
    texts: Annotated[list[Text], Field(max_length=MAX_IMAGES)]
    """What each image shows."""
    tries: Annotated[int, Field(ge=1, le=MAX_TRIES)] = 4


@router.post("/api/repairs")
def repair(form: RepairForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue the repair of a set."""
    _check_mode(state, "set")
    prompts = models.panel_prompts(state.names, form.texts)
    return _check(form, state, browser, prompts=prompts, tries=form.tries)


def _keep_repaired(
    job: Job, form: CheckForm, state: AppState, *, uploads: Sequence[Upload], grid: Grid | None
) -> dict[str, str]:
    """Add a repaired page to the history, beside the page before, and return its address; none for a mere check."""
    repaired = job.result
    if not (isinstance(form, RepairForm) and repaired and models.PAGE in job.images):
        return {}

    # The page before, at the same layout.
    opened = [upload.open() for upload in uploads]
    before = opened[0] if grid else models.page_of(opened, None)
    layout = grid or layout_for(len(uploads))
    theme = form.theme.strip()
    texts = [text.strip().removeprefix(f"{theme}, ") for text in form.texts]
    recipe = {"theme": theme, "panels": json.dumps(form.texts, ensure_ascii=False), "layout": str(layout)}
    page = open_image(job.images[models.PAGE], name="the repaired page")

    asked = {"panels": texts, "shared": form.shared, "layout": str(layout)}
    candidate = models.redrawn_page(asked, page, recipe)
    candidate |= {"score": repaired["mean"], "matrix": repaired["matrix"], "error": ""}
    document = {
        "kind": "set",
        "theme": theme or "A repaired page",
        "judge": repaired["judge"],
        "model": state.names.model,
        "adapter": "",
        "lora_scale": 1.0,
        "sources": ["source-1"],
        "asked": SetForm(theme=theme, panels=texts, layout=str(layout)).model_dump(),
        "candidates": [candidate],
    }
    images = {models.PAGE: png_bytes(page, recipe), "source-1": png_bytes(before)}
    try:
        return {"kept": state.history.add(document, images)}
    except OSError as error:  # its image can be saved all the same
        return {"note": f"This page is not in the history: {error.strerror or error}."}


def _check(form: CheckForm, state: AppState, browser: str, **repair: Any) -> dict[str, Any]:
    uploads, options = _asked(form, state, browser)
    panels = options["grid"].count if options["grid"] else len(uploads)
    if repair and len(repair["prompts"]) != panels:
        raise ValueError(f"{len(repair['prompts'])} lines describe {panels} images; write one line for each image")
    plain = not (options["theme"] or options["criteria"])
    least = threshold(state.calibration, form.least, panels=panels, plain=plain)

    def work(job: Job) -> Mapping[str, Any]:
        keep = partial(_keep_repaired, job, form, state, uploads=uploads, grid=options["grid"])
        try:
            result = state.host.check(job, uploads=uploads, least=least, **options, **repair)
        except CancelledError:  # a page that is better already stays
            job.result = {**(job.result or {}), **keep()}
            raise
        return {**result, **keep()}

    return state.jobs.submit("judgement", work, owner=browser).to_dict()


def _asked(form: JudgeForm, state: AppState, browser: str) -> tuple[list[Upload], dict[str, Any]]:
    """Check a form, and return its images and the arguments that `judge` and `check` of the models share."""
    state.trainer.check_idle()
    grid = _grid(form.layout)
    count = len(form.uploads)
    if grid and count != 1:
        raise ValueError(f"a grid image is cut alone, and {count} images are given")
    if not grid and count < 2:
        raise ValueError("one image has nothing to be compared with; add another, or choose how to cut it")
    if grid and not 2 <= grid.count <= MAX_IMAGES:
        raise ValueError(f"a {grid} image has {grid.count} panels; 2 to {MAX_IMAGES} can be judged")

    # The job keeps the images: removing an upload while the job waits does not change its judgement.
    uploads = _uploads_to_open(state, form.uploads, browser)
    criteria = []
    for text in form.criteria:
        if text.strip():
            criteria.append(text.strip())

    theme = form.shared.strip() or form.theme.strip()
    return uploads, {"theme": theme, "criteria": criteria, "grid": grid, "symmetric": form.symmetric}
