"""The planted faults of ``tests/mutations.py`` fit the present code. Their tests run by hand."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.mutations import MUTATIONS, ROOT, TESTS, Mutation

FILES = {mutation.file for mutation in MUTATIONS}


@functools.cache
def present(text: str) -> str:
    """Return the syntax tree of a file as text. Each file has several planted faults."""
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.what}")
def test_the_original_text_of_a_planted_fault_occurs_once_in_its_file(mutation: Mutation) -> None:
    text = (ROOT / "src/overlord" / mutation.file).read_text()

    assert text.count(mutation.old) == 1, mutation.old
    changed = text.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(changed)) != present(text)


@pytest.mark.parametrize("package", sorted({file.partition("/")[0] for file in FILES}))
def test_every_package_with_planted_faults_names_tests_that_exist(package: str) -> None:
    assert [test for test in TESTS[package] if not (ROOT / "tests" / test).is_file()] == []
