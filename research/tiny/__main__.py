"""Commands of the tiny world: `python -m research.tiny …`, from the repository's root."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Option

app = typer.Typer(help="Train the tiny checkpoints again (docs/tiny.md).", no_args_is_help=True)
OUT = Option(Path("runs/tiny"), help="Folder for the checkpoints.")
SHARE = Option(1.0, help="Share of the documented training steps, for a quick try.")


@app.callback()
def threads() -> None:
    from pacorl.runtime.cores import use_cores

    use_cores()


@app.command()
def vae(out: Path = OUT, share: float = SHARE) -> None:
    """The autoencoder (about 13 CPU minutes)."""
    from research.tiny.pretrain import pretrain_vae

    pretrain_vae(out / "vae", share=share)


@app.command()
def generator(out: Path = OUT, share: float = SHARE) -> None:
    """The generator at 64 and 128 px, from `vae` (about 75 CPU minutes)."""
    from diffusers import AutoencoderKL

    from research.tiny.pretrain import pretrain_generator

    pretrain_generator(out / "flux-first", vae=AutoencoderKL.from_pretrained(out / "vae"), share=share)


@app.command()
def sizes(
    out: Path = OUT,
    share: float = SHARE,
    start: Path | None = Option(None, help="The tiny FLUX to go on from; by default the committed one."),
) -> None:
    """The generator at 48, 64, 96 and 128 px, from that of `generator` (about 10 CPU minutes)."""
    from pacorl.tiny import CHECKPOINTS
    from research.tiny.pretrain import pretrain_sizes

    pretrain_sizes(out / "flux", start=start or CHECKPOINTS / "flux", share=share)


@app.command()
def nine(
    out: Path = OUT,
    share: float = SHARE,
    start: Path | None = Option(None, help="The tiny FLUX to go on from; by default the committed one."),
) -> None:
    """A generator of 3×3 grids for measurements, not committed (about 20 CPU minutes)."""
    from pacorl.tiny import CHECKPOINTS
    from research.tiny.pretrain import pretrain_nine

    pretrain_nine(out / "nine", start=start or CHECKPOINTS / "flux", share=share)


@app.command()
def judge(
    out: Path = OUT,
    share: float = SHARE,
    start: Path | None = Option(None, help="Go on from this judge, with fewer captions."),
    steps: int = Option(5000, help="Training steps of 32 examples."),
    lr: float = Option(1.5e-3, help="Learning rate."),
) -> None:
    """The judge's first lesson, from `vae` and failures of `generator` (about 60 CPU minutes)."""
    from diffusers import AutoencoderKL

    from research.tiny.negatives import policy_failures
    from research.tiny.pretrain_judge import pretrain_judge

    vae = AutoencoderKL.from_pretrained(out / "vae")
    failures = policy_failures(out / "flux", count=48)
    pretrain_judge(out / "judge-first", vae=vae, start=start, negatives=failures, share=share, steps=steps, lr=lr)


@app.command()
def judge_second(
    out: Path = OUT,
    share: float = SHARE,
    *,
    start: Path | None = Option(None, help="The judge to go on from; by default that of `judge`."),
    steps: int = Option(4400, help="Training steps of 32 examples."),
    lr: float = Option(1.2e-3, help="Learning rate."),
    resume: bool = Option(False, help="Go on from an interrupted training's state in OUT."),
) -> None:
    """The judge's second lesson: references, faulty and small panels (about 40 CPU minutes)."""
    from diffusers import AutoencoderKL

    from research.tiny.negatives import policy_failures
    from research.tiny.pretrain_judge import pretrain_judge, second_examples

    pretrain_judge(
        out / "judge",
        vae=AutoencoderKL.from_pretrained(out / "vae"),
        teach=second_examples,
        start=start or out / "judge-first",
        negatives=policy_failures(out / "flux", count=96),
        faulty=round(6000 * min(1, 10 * share)),
        share=share,
        steps=steps,
        lr=lr,
        resume=resume,
    )


@app.command()
def clip(out: Path = OUT, share: float = SHARE) -> None:
    """The CLIP of panels and texts, from the autoencoder of `vae` or the committed one (about 2 CPU minutes)."""
    from diffusers import AutoencoderKL

    from pacorl.tiny import CHECKPOINTS
    from research.tiny.pretrain_clip import pretrain_clip

    vae = out / "vae" if (out / "vae").is_dir() else CHECKPOINTS / "flux" / "vae"
    pretrain_clip(out / "clip", vae=AutoencoderKL.from_pretrained(vae).float(), share=share)


@app.command()
def edits(out: Path = OUT) -> None:
    """Sources and instructions, as `edits/train.jsonl`, dev.jsonl and test.jsonl (seconds)."""
    from research.tiny.pretrain import draw_edits

    typer.echo("\n".join(str(path) for path in draw_edits(out / "edits")))


@app.command()
def kontext(
    out: Path = OUT,
    share: float = SHARE,
    start: Path | None = Option(None, help="The tiny FLUX to start from; by default the committed one."),
) -> None:
    """The editor's first lessons, from the tiny FLUX (about 40 CPU minutes)."""
    from pacorl.tiny import CHECKPOINTS
    from research.tiny.pretrain import pretrain_kontext

    pretrain_kontext(out / "kontext-first", start=start or CHECKPOINTS / "flux", share=share)


@app.command()
def heroes(out: Path = OUT) -> None:
    """Reference images of heroes and scenes, as `heroes/train.jsonl`, dev.jsonl and test.jsonl (seconds)."""
    from research.tiny.heroes import draw_heroes

    typer.echo("\n".join(str(path) for path in draw_heroes(out / "heroes")))


@app.command()
def references(
    out: Path = OUT,
    share: float = SHARE,
    start: Path | None = Option(None, help="The tiny Kontext to go on from; by default the committed one."),
) -> None:
    """The editor that also draws a hero from references, from that of `kontext` (about 12 CPU minutes)."""
    from pacorl.tiny import CHECKPOINTS
    from research.tiny.pretrain import pretrain_references

    pretrain_references(out / "kontext", start=start or CHECKPOINTS / "kontext", share=share)


@app.command()
def steady(
    out: Path = OUT,
    share: float = SHARE,
    start: Path | None = Option(None, help="The tiny Kontext that it belongs to; by default the committed one."),
) -> None:
    """The LoRA of the editor that keeps a hero, which the studio uses (about 6 CPU minutes)."""
    from pacorl.tiny import CHECKPOINTS
    from research.tiny.pretrain import pretrain_steady

    pretrain_steady(out / "steady", start=start or CHECKPOINTS / "kontext", share=share)


@app.command()
def edit_judge(
    out: Path = OUT,
    share: float = SHARE,
    start: Path | None = Option(None, help="The judge to go on from; by default the committed one."),
    steps: int = Option(900, help="Training steps of 32 examples."),
    lr: float = Option(8e-4, help="Learning rate."),
) -> None:
    """The judge of edits, from the tiny judge (about 25 CPU minutes)."""
    from diffusers import AutoencoderKL

    from pacorl.judge.local import TINY_JUDGE
    from pacorl.tiny import CHECKPOINTS
    from research.tiny.pretrain_judge import edit_examples, pretrain_judge

    vae = AutoencoderKL.from_pretrained(CHECKPOINTS / "flux" / "vae").float()
    start = start or TINY_JUDGE
    pretrain_judge(out / "edit-judge", vae=vae, teach=edit_examples, start=start, share=share, steps=steps, lr=lr)


@app.command("all")
def everything(out: Path = OUT, share: float = SHARE) -> None:
    """All checkpoints, in order (about four CPU hours)."""
    vae(out, share)
    generator(out, share)
    sizes(out, share, start=out / "flux-first")
    judge(out, share, start=None, steps=5000, lr=1.5e-3)
    judge_second(out, share, start=None, steps=4400, lr=1.2e-3, resume=False)
    clip(out, share)
    edits(out)
    kontext(out, share, start=out / "flux")
    heroes(out)
    references(out, share, start=out / "kontext-first")
    steady(out, share, start=out / "kontext")
    edit_judge(out, share, start=out / "judge", steps=900, lr=8e-4)


if __name__ == "__main__":
    app()
