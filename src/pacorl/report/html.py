"""HTML of every page: templates of this package, with the stylesheet and the script inside.

Judge and generation write pages too, so this file and `figures` import no report.
"""

from functools import cache

import jinja2

from pacorl.core.metric_names import sign_meaning
from pacorl.report import figures


def render(template: str, /, **contents: object) -> str:
    """Render a template of this package, with the stylesheet and the script inside; all texts are escaped."""
    return _environment().get_template(template).render(**contents)


@cache  # a run writes its page after every evaluation, and compiling the templates takes a third of it
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pacorl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,  # a misspelt name is a fault, and no empty text
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("label", "amount", "change"):
        environment.filters[name] = getattr(figures, name)
    environment.filters["sign_meaning"] = sign_meaning
    environment.globals |= {"MEANINGS": figures.MEANINGS, "STRONG": figures.STRONG, "zip": zip}
    return environment
