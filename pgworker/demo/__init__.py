"""The demo: a full-text index of a folder, kept fresh by jobs. A small app of its own, made as yours would be.

Each file is a row of the app's own table `pgworker_demo.documents`, written in the same transaction as a job of kind
`index_file`: its key is the file, its revision the content's hash, so that an unchanged file is no work at all. A batch
handler reads the files and counts their words; what it found becomes searchable in the transaction that completes the
job. One database may hold several folders of one machine: a folder is known by its path.

files   which files a folder has, and reading one of them without being led out of the folder
text    from bytes to text, from text to the words that are indexed
store   the app's own tables
jobs    the kind: payload, handler, and the write that joins its completion
run     bring the index up to date, once or for ever
report  what a run says about itself
search  ranked hits with the lines that match
"""

from __future__ import annotations

from pgworker.demo.files import default_folder, real_folder
from pgworker.demo.report import Failures, Progress, Report
from pgworker.demo.run import Indexer
from pgworker.demo.search import Found, Hit, Line, Piece, search

__all__ = [
    "Failures",
    "Found",
    "Hit",
    "Indexer",
    "Line",
    "Piece",
    "Progress",
    "Report",
    "default_folder",
    "real_folder",
    "search",
]
