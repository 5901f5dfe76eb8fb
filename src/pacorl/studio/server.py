"""The HTTP API and the page (`pacorl studio`).

    GET    /join/TOKEN             opens the page as the owner of the token
    GET    /api/state              models, words, limits, what is under way
    GET    /api/example            something to ask for
    POST   /api/panels             {text} → the theme and panels of a sentence, to be edited before they are generated
    POST   /api/sets               {theme, panels, …} → a job that generates and ranks candidates
    POST   /api/edits              {instruction, sources, …} → the same from pictures
    POST   /api/storyboards        {title, characters, scenes, …} → a job that generates pages
    GET    /api/history            the sets that were made; /api/history/ID is one of them, DELETE forgets it
    GET    /sets/ID/NAME.png       an image of a set; /sets/ID/N.zip is its candidate N, from 0, with its recipe
    GET    /api/taste              the LoRAs that are taught, and the one under way with the group to be ranked
    POST   /api/taste              {name, prompts, …} → teaches one; /api/taste/NAME/continue, /stop and /use
    POST   /api/taste/NAME/ranks   {group, ranks} → keeps a person's ranking
    GET    /taste/NAME/GROUP/N.png an image to be ranked; /taste/NAME/pictures/before-N.png is one of an evaluation
    POST   /api/uploads?name=…     the bytes of one image; DELETE /api/uploads/ID takes it back
    POST   /api/judgements         {uploads, theme, …} → a job that judges every pair
    GET    /api/jobs/ID            how far it is, and its result; DELETE cancels it
    GET    /images/ID/NAME.png     a job's image

Everything but the page itself asks for the token, as a cookie or as `Authorization: Bearer`. Sets are written into the
history's folder, uploads nowhere, and the page may ask for nothing outside this server.
"""

from __future__ import annotations

import hmac
import secrets
import signal
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request, Response
from pydantic import Field

from pacorl.config.options import StudioModels
from pacorl.core.grid import parse_layout
from pacorl.generate.panels import write_panels
from pacorl.studio import models
from pacorl.studio.history import MAX_SETS, History
from pacorl.studio.jobs import Job, JobQueue, Work
from pacorl.studio.models import MAX_BYTES, MAX_IMAGES, MAX_PIXELS, ModelHost, Sampling, Upload, Uploads
from pacorl.studio.taste import TasteRequest, TasteRuns
from pacorl.types import TINY, Grid, Size
from pacorl.web import forms
from pacorl.web.connections import run
from pacorl.web.forms import Form
from pacorl.web.guard import BodyLimit, RefusedError
from pacorl.web.site import Route, Session, Site, error_response, listening

PAGE = Path(__file__).parent / "page"
MAX_CANDIDATES = 50
MAX_SIDE = 4096
MAX_SCENES = 64

LIMITS = {
    "bytes": MAX_BYTES,
    "pixels": MAX_PIXELS,
    "images": MAX_IMAGES,
    "candidates": MAX_CANDIDATES,
    "sets": MAX_SETS,
}
"""What the page says before a request is refused."""

BODIES = {"/api/uploads": BodyLimit(MAX_BYTES, marks=None)}
"""Limits of bodies; images are uploaded one at a time."""

Text = Annotated[forms.Text, Field(max_length=4000)]


class SamplingForm(Form):
    """What every form of making has."""

    candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 4
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    steps: Annotated[int, Field(ge=1, le=200)] | None = None
    size: Annotated[forms.Text, Field(max_length=11)] = ""
    lora_scale: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    compare: bool = True

    def sampling(self, adapter: str) -> Sampling:
        """Raises ValueError for a size that is none or too large, and for a strength of no LoRA."""
        size = Size.parse(self.size) if self.size.strip() else None
        if size and max(size.height, size.width) > MAX_SIDE:
            raise ValueError(f"an image of {self.size} pixels is too large; each side may have {MAX_SIDE}")
        if self.lora_scale != 1 and not adapter:
            raise ValueError("lora_scale has no LoRA to act on; start the studio with --adapter")
        return Sampling(
            candidates=self.candidates,
            seed=self.seed,
            size=size,
            steps=self.steps,
            lora_scale=self.lora_scale,
            compare=self.compare and bool(adapter),
        )


class SetForm(SamplingForm):
    theme: Text
    panels: Annotated[list[Text], Field(max_length=16)]
    layout: Annotated[forms.Text, Field(max_length=9)] = ""


class SentenceForm(Form):
    text: Text


class EditForm(SamplingForm):
    instruction: Text
    sources: Annotated[list[Text], Field(min_length=1, max_length=MAX_IMAGES)]


class StoryboardForm(SamplingForm):
    title: Text
    style: Text = ""
    layout: Annotated[forms.Text, Field(max_length=9)] = "2x2"
    characters: dict[Text, Text] = Field({}, max_length=12)
    scenes: Annotated[list[Text], Field(max_length=MAX_SCENES)]


class TasteForm(Form):
    name: Annotated[forms.Text, Field(min_length=1, max_length=60)]
    prompts: Annotated[list[Text], Field(max_length=500)]
    rounds: Annotated[int, Field(ge=1, le=1000)] = 20
    groups: Annotated[int, Field(ge=1, le=20)] = 2
    group_size: Annotated[int, Field(ge=2, le=9)] = 8
    judge_share: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.5


class RanksForm(Form):
    group: Text
    ranks: Annotated[list[int], Field(max_length=64)]


class JudgeForm(Form):
    uploads: Annotated[list[Text], Field(max_length=MAX_IMAGES)]
    theme: Text = ""
    criteria: list[Text] = Field([], max_length=12)
    layout: Annotated[forms.Text, Field(max_length=9)] = ""
    symmetric: bool = False


@dataclass(slots=True)
class AppState:
    """What the endpoints share."""

    token: str
    names: StudioModels = field(default_factory=StudioModels)
    folder: Path | None = None
    """Of the history and of the runs that are taught; without one they end with the studio."""
    recipe: Path | None = None
    """The config that these runs begin with; the paper's values without one."""
    jobs: JobQueue = field(default_factory=JobQueue)
    uploads: Uploads = field(default_factory=Uploads)
    host: ModelHost = field(init=False)
    loading: Job = field(init=False)
    site: Site = field(init=False)
    history: History = field(init=False)
    taste: TasteRuns = field(init=False)
    _temporary: tempfile.TemporaryDirectory[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="pacorl-history-")
        folder = self.folder or Path(self._temporary.name)  # type: ignore[union-attr]
        self.history = History(folder)
        self.taste = TasteRuns(folder / "taste", self.names, recipe=self.recipe)
        self.host = ModelHost(self.names)
        self.loading = self.jobs.submit("load", self.host.load)
        self.site = Site("pacorl studio", PAGE, "pacorl_studio", self._sign_in, BODIES)

    def close(self) -> None:
        self.taste.stop()
        self.jobs.close()
        self.host.close()
        self.history.close()
        if self._temporary:
            self._temporary.cleanup()

    def is_owner(self, token: str) -> bool:
        # In constant time: how long a comparison takes must not tell how much of the token is right.
        return hmac.compare_digest(token.encode(), self.token.encode())

    def _sign_in(self, token: str) -> Session:
        if not self.is_owner(token):
            raise RefusedError("this link is not, or no longer, the studio's; use the one that it printed", status=401)
        return Session()


def serve(
    names: StudioModels,
    *,
    history: Path | None = None,
    recipe: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8767,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM; port 0 takes a free one, and without a `history` sets end with the studio.

    A LoRA is taught by the config `recipe`, with its prompts, its rewards' shares and a person changed.

    Raises:
        OSError: if the port is taken.
        ValueError: if another studio has that history.
    """
    # uvicorn raises a signal again once it has shut down, and SIGTERM's default would end the process before `close`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listening(host, port) as (listener, url):
        state = AppState(secrets.token_urlsafe(16), names, history, recipe)
        announce(f"studio: {url}/join/{state.token}")
        try:
            run(make_app(state), sockets=[listener])
        finally:
            state.close()


def make_app(state: AppState) -> FastAPI:
    """The server of one studio."""
    routes: list[Route] = [
        ("GET", "/api/state", page_state),
        ("GET", "/api/example", give_example),
        ("POST", "/api/panels", write_set),
        ("POST", "/api/sets", make_set),
        ("POST", "/api/edits", make_edit),
        ("POST", "/api/storyboards", make_storyboard),
        ("GET", "/api/history", history),
        ("GET", "/api/history/{name}", earlier_set),
        ("DELETE", "/api/history/{name}", forget_set),
        ("GET", "/sets/{name}/{file}.png", set_image),
        ("GET", "/sets/{name}/{number}.zip", export),
        ("GET", "/api/taste", taste_state),
        ("POST", "/api/taste", teach),
        ("POST", "/api/taste/{name}/continue", teach_on),
        ("POST", "/api/taste/{name}/stop", stop_teaching),
        ("POST", "/api/taste/{name}/use", use_taught),
        ("POST", "/api/taste/{name}/ranks", rank),
        ("GET", "/taste/{name}/pictures/{when}-{number}.png", taste_picture),
        ("GET", "/taste/{name}/{group}/{number}.png", taste_image),
        ("POST", "/api/uploads", upload),
        ("GET", "/uploads/{name}", preview),
        ("DELETE", "/api/uploads/{name}", take_back),
        ("POST", "/api/judgements", judge),
        ("GET", "/api/jobs/{name}", job_state),
        ("DELETE", "/api/jobs/{name}", cancel),
        ("GET", "/images/{name}/{file}.png", image),
    ]
    app = state.site.app(routes, state=state)
    # Prompts, sizes and images of users raise ValueError with one line for them, wherever they are checked.
    app.add_exception_handler(ValueError, lambda request, error: error_response(error))
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
"""One person may have several open; what is handed in or made in one is not seen in the next."""


# --- state -----------------------------------------------------------------------------------------------------


def page_state(state: State, browser: Browser) -> dict[str, Any]:
    """What the page needs to draw itself, after a reload too."""
    names = state.names
    return {
        "model": names.model,
        "adapter": names.adapter,
        "judge": names.judge_model or names.judge,
        "tiny": {"model": names.model == TINY, "judge": names.judge == TINY},
        "words": models.words(names),
        "example": models.example(names, 0),
        # They may be gone since, while a LoRA was taught; the next job then loads them again.
        "ready": state.loading.status == "done",
        "cannot": state.host.modes,
        "fault": state.loading.error,
        "latest": {kind: job.id for kind in ("set", "judgement") if (job := state.jobs.latest(kind, owner=browser))},
        "uploads": _upload_dicts(state, browser),
        "limits": LIMITS,
    }


def give_example(state: State, number: int = 0) -> dict[str, Any]:
    return models.example(state.names, number)


def job_state(name: str, state: State, browser: Browser) -> dict[str, Any]:
    job = _job(state, name, browser)
    ahead = [other for other in state.jobs.unfinished if int(other.id) < int(job.id)] if job.status == "queued" else []
    waiting_for = ahead[0].phase or ahead[0].kind if ahead else ""
    return {**job.to_dict(), "ahead": len(ahead), "waiting_for": waiting_for}


def cancel(name: str, state: State, browser: Browser) -> dict[str, Any]:
    job = _job(state, name, browser)
    if job.kind != "load":
        state.jobs.cancel(job)
    return job.to_dict()


def _job(state: AppState, name: str, browser: str) -> Job:
    job = state.jobs.find(name)
    if job is None or job.owner != browser:
        raise RefusedError(f"there is no job {name[:20]!r}; old ones are forgotten", status=404)
    return job


def image(name: str, file: str, state: State, browser: Browser) -> Response:
    return _png(_job(state, name, browser).images.get(file))


# --- making ----------------------------------------------------------------------------------------------------


def write_set(form: SentenceForm, state: State) -> dict[str, Any]:
    return asdict(write_panels(form.text, writer=state.names.writer, model=state.names.writer_model))


def make_set(form: SetForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue a set; what the model does not know is refused at once."""
    prompt = models.prompt_for(state.names, form.theme, form.panels, _grid(form.layout))
    sampling = form.sampling(state.names.adapter)
    return _make(state, browser, form, lambda job: state.host.make_set(job, prompt, sampling))


def make_edit(form: EditForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue an edit of uploads; that the generator edits nothing is said by the job, once it is loaded."""
    prompt, sampling = models.edit_prompt(state.names, form.instruction), form.sampling(state.names.adapter)
    if reason := (state.host.modes or {}).get("edit"):
        raise ValueError(reason)
    sources = [_upload(state, name, browser) for name in form.sources]
    return _make(state, browser, form, lambda job: state.host.make_set(job, prompt, sampling, sources=sources))


def make_storyboard(form: StoryboardForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue the pages of a storyboard."""
    sampling = form.sampling(state.names.adapter)
    document = {key: getattr(form, key) for key in ("title", "style", "layout", "characters", "scenes")}
    board = models.board_for(state.names, document)
    return _make(state, browser, form, lambda job: state.host.make_storyboard(job, board, sampling))


def _make(state: AppState, browser: str, form: SamplingForm, work: Work) -> dict[str, Any]:
    """Queue work whose result is a set, and goes into the history."""

    state.taste.check_idle()

    def make(job: Job) -> dict[str, Any]:
        document = {**work(job), "asked": form.model_dump()}
        try:
            name = state.history.add(document, job.images)
        except OSError as error:  # what took minutes is shown all the same
            return {**document, "note": f"This set is not in the history: {error.strerror or error}."}
        job.images = {}
        return {**document, "id": name, "images": f"/sets/{name}"}

    return state.jobs.submit("set", make, owner=browser).to_dict()


# --- the history -----------------------------------------------------------------------------------------------


def history(state: State) -> list[dict[str, Any]]:
    return state.history.summaries()


def earlier_set(name: str, state: State) -> dict[str, Any]:
    if (document := state.history.read(name)) is None:
        raise RefusedError(f"there is no set {name[:20]!r} any more; the history keeps the newest", status=404)
    return {**document, "id": name, "images": f"/sets/{name}"}


def forget_set(name: str, state: State) -> list[dict[str, Any]]:
    state.history.remove(name)
    return state.history.summaries()


def set_image(name: str, file: str, state: State) -> Response:
    return _png(state.history.image(name, file))


def export(name: str, number: int, state: State) -> Response:
    if (content := state.history.export(name, number)) is None:
        raise RefusedError(f"there is no candidate {number} of a set {name[:20]!r}", status=404)
    disposition = f'attachment; filename="pacorl-set-{name}-{number + 1}.zip"'
    return Response(content, media_type="application/zip", headers={"Content-Disposition": disposition})


def _png(content: bytes | None) -> Response:
    if content is None:
        raise RefusedError("there is no such image", status=404)
    # An image never changes under its name, and a page that is loaded again shows all of them.
    return Response(content, media_type="image/png", headers={"Cache-Control": "private, max-age=86400"})


def _grid(text: str) -> Grid | None:
    return parse_layout(text) if text.strip() else None


# --- you are the reward ----------------------------------------------------------------------------------------


def taste_state(state: State, name: str = "", group: str = "") -> dict[str, Any]:
    """All runs, and where one of them stands: the one that is named, or the newest that was started."""
    runs = state.taste.names_of_runs()
    name = name or state.taste.newest
    current = state.taste.state(name, group=group) if name else None
    return {"runs": runs, "current": current, "example": models.taste_example(state.names)}


def teach(form: TasteForm, state: State) -> dict[str, Any]:
    """Start a run; what cannot be trained is refused before anything is written."""
    state.taste.check_idle()
    request = TasteRequest(**{**form.model_dump(), "prompts": tuple(form.prompts)})
    return _launch(state, state.taste.create(request))


def teach_on(name: str, state: State) -> dict[str, Any]:
    state.taste.check_idle()
    return _launch(state, name)


def _launch(state: AppState, name: str) -> dict[str, Any]:
    def launch(job: Job) -> dict[str, Any]:
        state.host.unload()  # two generators would not fit most cards
        state.taste.launch(name)
        return {}

    state.taste.announce(name)
    state.jobs.submit("taste", launch)
    return state.taste.state(name)


def stop_teaching(name: str, state: State) -> dict[str, Any]:
    state.taste.stop()
    return state.taste.state(name)


def rank(name: str, form: RanksForm, state: State) -> dict[str, Any]:
    state.taste.rank(name, form.group, form.ranks)
    return state.taste.state(name)


def use_taught(name: str, state: State) -> dict[str, Any]:
    """Load what was taught in place of the studio's adapter."""
    state.taste.check_idle()
    if not (adapter := state.taste.state(name)["adapter"]):
        raise RefusedError(f"{name} has no LoRA yet; stop it, or rank five rounds", status=409)
    state.names = state.host.names = replace(state.names, adapter=adapter)

    def load(job: Job) -> dict[str, Any]:
        state.host.unload()
        return state.host.load(job)

    state.loading = state.jobs.submit("load", load)
    return {"adapter": adapter}


def taste_image(name: str, group: str, number: int, state: State) -> Response:
    return _png(state.taste.image(name, group, number))


def taste_picture(name: str, when: Literal["before", "after"], number: int, state: State) -> Response:
    response = _png(state.taste.picture(name, when, number))
    response.headers["Cache-Control"] = "no-store"  # the newest evaluation's
    return response


# --- judging ---------------------------------------------------------------------------------------------------


async def upload(request: Request, state: State, browser: Browser, name: str = "image") -> dict[str, Any]:
    """One image's bytes. What cannot be judged is refused by name."""
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


def preview(name: str, state: State, browser: Browser) -> Response:
    return Response(_upload(state, name, browser).preview, media_type="image/png")


def take_back(name: str, state: State, browser: Browser) -> dict[str, Any]:
    state.uploads.remove(name, owner=browser)
    return {"uploads": _upload_dicts(state, browser)}


def judge(form: JudgeForm, state: State, browser: Browser) -> dict[str, Any]:
    """Queue a judgement of two images or more, or of one that is cut apart."""
    state.taste.check_idle()
    grid, count = _grid(form.layout), len(form.uploads)
    if grid and count != 1:
        raise ValueError(f"a grid image is cut alone, and {count} images are given")
    if not grid and count < 2:
        raise ValueError("one image has nothing to be compared with; add another, or say how to cut it")
    if grid and not 2 <= grid.count <= MAX_IMAGES:
        raise ValueError(f"a {grid} image has {grid.count} panels; 2 to {MAX_IMAGES} can be judged")
    # Found now and not by the job: an image that is taken back while the job waits is judged all the same.
    uploads = [_upload(state, name, browser) for name in form.uploads]
    options: dict[str, Any] = {"theme": form.theme.strip(), "grid": grid, "symmetric": form.symmetric}
    options["criteria"] = [text.strip() for text in form.criteria if text.strip()]
    job = state.jobs.submit("judgement", lambda job: state.host.judge(job, uploads, **options), owner=browser)
    return job.to_dict()
