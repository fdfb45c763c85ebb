"""Draws a trace as one HTML file that needs neither a server nor a network."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from vllm_trie.trace.trace import Trace

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ margin: 0; }}
main {{ padding: 1em 1.5em; }}
h1 {{ font-size: 1.3rem; margin: 0; }}
{style}</style>
<main class="trie-trace"><h1>{title}</h1><div id="trace"></div></main>
<script type="application/json" id="answer">{answer}</script>
<script>
{layout}{view}
TraceView.show(document.getElementById("trace"), JSON.parse(document.getElementById("answer").textContent));
</script>
</html>
"""


def trace_page(trace: Trace, title: str = "Beam search") -> str:
    """The HTML page that draws a trace."""
    scripts = {
        name: (files("vllm_trie.trace") / "page" / f"{name}.js").read_text("utf-8") for name in ("layout", "view")
    }
    style = (files("vllm_trie.trace") / "page" / "style.css").read_text("utf-8")
    answer = trace.to_json().replace("<", "\\u003c")  # otherwise a token might end the script
    return _PAGE.format(title=escape(title), style=style, answer=answer, **scripts)
