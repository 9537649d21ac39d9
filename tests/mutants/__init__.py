"""Mutants of the statements and of the pure decisions: each must be killed by a test, or have its reason to live.

    python -m tests.mutants                     make `make mutants`
    python -m tests.mutants --only claim_jobs   one statement, module or mutant
    PGWORKER_MUTANT='claim_jobs/...' pytest -p tests.mutants.plugin ...   tests under one mutant, by hand

sqltext     the mutants of one SQL statement
pycode      the mutants of named definitions in a module
catalogue   which files are mutated, by which names, and which tests may kill them
plugin      the part of both that runs inside pytest
place       puts a mutant in the place of its file, in one process
survey      a run without a mutant: which tests pass, how long they take, which statements they send
trial       runs tests under mutants, in processes of their own
check       whether what was made is still SQL or Python
__main__    runs what must be run, and compares with survivors.toml
"""
