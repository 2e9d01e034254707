"""One self-contained HTML page from result files: no network, light and dark, from file:// as well.

`results` reads files and tells them apart; `curves`, `records`, `runs` and `route_map` make the parts that `parts`
names; `plots` draws; `html` puts them on the page that `page.html.j2` lays out.
"""

from hipfire_kernels.bench.report.html import page

__all__ = ["page"]
