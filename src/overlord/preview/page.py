"""A preview as one HTML page, self-contained: no script, font or link; images are thumbnails."""

from __future__ import annotations

from base64 import b64encode
from html import escape

from overlord.observe.terminal_text import one_line
from overlord.preview.decoder import SPECIAL, UNKNOWN, Segment
from overlord.preview.pictures import Picture
from overlord.preview.preview import Preview, PreviewMicrobatch, PreviewSample
from overlord.preview.text import counts, display, heading, mark

_STYLE = """
:root { color-scheme: light dark; --page:#f9f9f7; --card:#fff; --ink:#161614; --soft:#6d6b66;
  --line:#e0dfda; --loss:#dff3e4; --none:#8a8883; --special:#7a3fb0; --tag:#f1eaf8; --bad:#b3261e; }
@media (prefers-color-scheme: dark) { :root { --page:#111110; --card:#1b1b19; --ink:#eeece6;
  --soft:#a3a199; --line:#34332f; --loss:#1d3a26; --none:#8f8d86; --special:#c9a2ee; --tag:#2c2338;
  --bad:#f2867f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 28px 20px 60px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 24px; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 28px 0 10px; overflow-wrap: anywhere; }
p { margin: 0 0 10px; color: var(--soft); }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin: 0 0 14px; padding: 10px 14px 12px; }
header { color: var(--soft); font-size: 13px; margin-bottom: 6px; overflow-wrap: anywhere; }
header b { color: var(--ink); }
.text { white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13.5px/1.65 ui-monospace, Menlo, Consolas, monospace; }
.text .loss { background: var(--loss); border-radius: 2px; } .text .none { color: var(--none); }
.text .special { color: var(--special); background: var(--tag); border-radius: 3px; padding: 0 3px;
  white-space: normal; }
.text .special.loss { background: var(--loss); font-weight: 600; }
.text .unknown { color: var(--bad); }
.images { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 10px; }
figure { margin: 0; } figcaption { font-size: 12px; color: var(--soft); }
img { display: block; border: 1px solid var(--line); border-radius: 4px; max-width: 192px; }
"""


def preview_page(preview: Preview) -> str:
    """Return the page of a preview."""
    what = f"source {preview.source}" if preview.step is None else f"step {preview.step}"
    title = escape(one_line(f"{preview.job}: {what}"))
    body = "\n".join(_microbatch(preview, batch) for batch in preview.microbatches)
    notes = "".join(f"<p>{escape(one_line(note))}</p>" for note in preview.notes)
    more = preview.hidden_microbatches
    rest = f"<p>and {more} more microbatches</p>" if more else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        '<p class="text"><span class="loss">with a loss</span>  <span class="none">without a '
        'loss</span>  <span class="special none">special token</span>  <span class="special '
        'loss">special token with a loss</span></p>\n'
        "<p>The first token of a document is never predicted.</p>\n"
        f"{notes}\n{body}\n{rest}\n</body>\n</html>\n"
    )


def _microbatch(preview: Preview, batch: PreviewMicrobatch) -> str:
    head = f"<h2>{escape(one_line(heading(preview, batch)))}</h2>"
    more = f"<p>and {batch.hidden_samples} more samples</p>" if batch.hidden_samples else ""
    return head + "\n" + "\n".join(map(_sample, batch.samples)) + more


def _sample(sample: PreviewSample) -> str:
    head = f"<b>{escape(one_line(sample.sample))}</b> {escape(counts(sample))}"
    text = "".join(map(_span, sample.segments))
    more = f"<p>... {sample.hidden_tokens:,} more tokens</p>" if sample.hidden_tokens else ""
    images = "".join(_figure(n, image) for n, image in enumerate(sample.images))
    gallery = f'<div class="images">{images}</div>' if images else ""
    return (
        f'<article><header>{head}</header><div class="text">{text}</div>{more}{gallery}</article>'
    )


def _span(segment: Segment) -> str:
    names = ["loss" if segment.loss > 0 else "none"]
    names += [segment.kind] if segment.kind in (SPECIAL, UNKNOWN) else []
    # A weight other than 0 and 1 is shown when the pointer rests on the run.
    title = f' title="loss weight {mark(segment.loss)}"' if segment.loss not in (0, 1) else ""
    text = display(segment)
    text = text[1:-1] if segment.kind in (SPECIAL, UNKNOWN) else text
    return f'<span class="{" ".join(names)}"{title}>{escape(text)}</span>'


def _figure(number: int, image: Picture) -> str:
    data = b64encode(image.png).decode("ascii")
    size = f"{image.width} x {image.height}"
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="image {number}, {size} pixels">'
        f"<figcaption>image {number}: {size}, {image.tokens} tokens, rank {image.rank}"
        "</figcaption></figure>"
    )
