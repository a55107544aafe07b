"""The report of a run: collect the data (`collect`), draw the plots (`figures`), render the page (`page`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from shards.durable import write_bytes, write_json
from trainer.records.run_directory import RunDirectory
from trainer.report.class_names import short_names
from trainer.report.collect import RunFacts, collect_report
from trainer.report.gallery import build_gallery
from trainer.report.next_steps import next_steps
from trainer.report.page import render_page
from trainer.report.pictures import ImageOf
from trainer.report.sources import SampleSources
from trainer.report.suspects import OPEN, thumbnails

__all__ = ["write_report"]


def write_report(
    run: RunDirectory,
    image_of: ImageOf | None = None,
    keys: pa.ChunkedArray | None = None,
    key_root: str | None = None,
    sources: SampleSources | None = None,
    class_names: Sequence[str] = (),
    gaps: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write report.json and report.html of a finished or unfinished run; returns the report.

    keys: the key of every sample, by sample_id; key_root: the folder in which they are paths, if they are;
    class_names: used if the manifest has none; gaps: what the caller could not find, one sentence each.
    """
    facts = RunFacts.read(run.root, class_names)
    selection, samples = facts.selection, facts.samples
    report = collect_report(facts, sources)
    report["gaps"] |= gaps or {}
    suspects, checked = report["suspicious"] or [], (report["corrections"] or {}).get("second_look") or []
    shown = [*suspects, *checked]
    ids = pa.array([sample["sample_id"] for sample in shown], pa.int64())
    for sample, key in zip(shown, [None] * len(ids) if keys is None else keys.take(ids).to_pylist(), strict=True):
        sample["key"] = key
    gallery = None
    if selection is not None and samples.inside.any():
        gallery = build_gallery(
            facts.run,
            selection,
            samples,
            short_names(samples.names),
            image_of=image_of,
            keys=keys,
            sources=sources,
            root=key_root,
        )
        if image_of is not None and gallery["id"] and not any(gallery["picture"]):
            report["gaps"]["shards"] = "No image could be read from the shards, so the gallery has no pictures."
    pictures = thumbnails([*suspects[:OPEN], *checked], image_of)
    page = render_page(report, pictures, next_steps(report, run), gallery)
    write_json(run.report_json, report)
    write_bytes(run.report_html, page.encode())
    return report
