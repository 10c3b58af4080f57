"""Results as a Markdown page with plots; knows not how anything was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from points import Absence, Result, Suite

Cells = dict[str, dict[str, list[float]]]  # row -> column -> samples


def percentile(samples: Sequence[float], percent: int) -> float:
    ordered = sorted(samples)
    return ordered[round(percent / 100 * (len(ordered) - 1))]


def quantity(value: float, unit: str) -> str:
    if unit == "s":
        scale, name = next(
            ((scale, name) for scale, name in ((1, "s"), (1e3, "ms")) if abs(value) * scale >= 1),
            (1e6, "µs"),
        )
        return f"{value * scale:.3g} {name}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    return "\n".join(lines)


def cells_of(results: Sequence[Result], suite: str, np: int) -> Cells:
    cells: Cells = {}
    for result in results:
        if (result.suite, result.np) == (suite, np):
            cells.setdefault(result.row, {})[result.column] = result.samples
    return cells


def columns_of(cells: Cells) -> list[str]:
    return list(dict.fromkeys(column for columns in cells.values() for column in columns))


def time_table(cells: Cells, suite: Suite) -> str:
    def cell(samples: Sequence[float] | None) -> str:
        if not samples:
            return "-"
        three = percentile(samples, 10), statistics.median(samples), percentile(samples, 90)
        low, middle, high = (quantity(value, suite.unit) for value in three)
        return f"**{middle}** ({low} .. {high})" if len(samples) > 1 else f"**{middle}**"

    columns = columns_of(cells)
    head = [suite.unit if suite.unit != "s" else "", *columns]
    return table(head, {row: [cell(cells[row].get(c)) for c in columns] for row in cells})


def ratio_table(cells: Cells, suite: Suite) -> str:
    """Ratios of medians."""
    columns = columns_of(cells)
    rows: dict[str, list[str]] = {}
    for which, reference in suite.ratios:
        below = cells.get(reference, {})
        for row in cells:
            if row == reference or (which not in ("*", row) and not row.startswith(which + ", ")):
                continue
            rows[f"{row} / {reference}"] = [
                f"{statistics.median(cells[row][c]) / statistics.median(below[c]):.2f}"
                if c in cells[row] and c in below
                else "-"
                for c in columns
            ]
    return table(["ratio", *columns], rows) if rows else ""


def plot(cells: Cells, suite: Suite, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = columns_of(cells)
    medians = {
        row: {column: statistics.median(samples) for column, samples in by_column.items()}
        for row, by_column in cells.items()
    }
    twenty = pyplot.get_cmap("tab20")
    colors = {row: twenty(i % 20) for i, row in enumerate(medians)} | {"limit": "black"}
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    if suite.plot == "lines":
        sizes = {point.name: point.size_bytes for point in suite.points}
        for row, values in medians.items():
            style = {"linestyle": "--"} if row == "limit" else {"marker": "o"}
            style |= {"color": colors[row], "linewidth": 2.5 if row == "horovod" else 1.2}
            x = [sizes[column] for column in values]
            axes.plot(x, list(values.values()), label=row, **style)
        axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel=suite.unit)
        axes.set_xticks(list(sizes.values()), list(sizes))
        axes.grid(alpha=0.3)
    else:
        width = 0.8 / len(medians)
        for i, (row, values) in enumerate(medians.items()):
            x = [columns.index(column) + (i - len(medians) / 2 + 0.5) * width for column in values]
            axes.bar(x, list(values.values()), width, label=row, color=colors[row])
        axes.set_xticks(range(len(columns)), columns)
        axes.set(ylabel=suite.unit)
        values = [value for by_column in medians.values() for value in by_column.values()]
        if min(values) > 0 and max(values) > 30 * min(values):
            axes.set_yscale("log")
    axes.set_title(title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(
    directory: Path,
    facts: Mapping[str, str],
    suites: Sequence[Suite],
    results: Sequence[Result],
    absences: Sequence[Absence],
) -> Path:
    """Writes report.md and its plots, and returns the path of the page."""
    lines = ["# Benchmarks", "", table(["what", "which"], {k: [v] for k, v in facts.items()}), ""]
    lines += ["Medians (10 % .. 90 % of all iterations), until the slowest rank is done.", ""]
    if absences:
        lines += ["## Absent", ""]
        lines += [f"- {absence}" for absence in absences] + [""]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        plots = False
        lines += ["No plots: matplotlib isn't installed.", ""]
    else:
        plots = True
    for suite in suites:
        sizes = sorted({result.np for result in results if result.suite == suite.name})
        lines += [f"## {suite.title}", "", suite.text, ""]
        lines += [] if sizes else ["Nothing was measured.", ""]
        for np in sizes:
            cells = cells_of(results, suite.name, np)
            lines += [f"### {suite.name}, {np} processes", "", time_table(cells, suite), ""]
            ratios = ratio_table(cells, suite)
            lines += [ratios, ""] if ratios else []
            if plots:
                path = directory / f"{suite.name}-np{np}.png"
                plot(cells, suite, f"{suite.title}, {np} processes", path)
                lines += [f"![{suite.name}, {np} processes]({path.name})", ""]
    page = directory / "report.md"
    page.write_text("\n".join(lines), "utf-8")
    return page
