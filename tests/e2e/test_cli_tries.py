"""`stemserve tries`, and generation over them, against a real server and a real worker."""

from pathlib import Path

from tests.e2e.cli_runs import Run, parsed

from stemserve.proto.v1 import tries_pb2


def test_tries_are_uploaded_used_and_deleted(run: Run, address: str, tmp_path: Path) -> None:
    server = ("--server", address, "--json")
    texts, tokens = tmp_path / "texts", tmp_path / "tokens"
    texts.write_text("one\n two\nthree\n\n")
    tokens.write_text("[1, 2]\n[3]\n")
    made = parsed(run("tries", "upload", *server, "--file", texts, "--trie-id", "t"))["trie"]
    assert (made["trie_id"], made["sequences"]) == ("t", 3)
    assert made.keys() == set(tries_pb2.Trie.DESCRIPTOR.fields_by_name)
    ids = parsed(run("tries", "upload", *server, "--file", tokens, "--tokens"))["trie"]
    assert ids["sequences"] == 2
    words = ("generate", *server, "--prompt", "say ", "--trie", "t")
    assert parsed(run(*words))["text"][0] in ("one", " two", "three")
    found = parsed(run(*words, "--beams", 5, "--n", 4))
    assert sorted(found["text"]) == ["", " two", "one", "three"]
    assert found["finish_reason"][3] == "FINISH_REASON_NONE_LEFT"
    plain = [word for word in words if word != "--json"]
    shown = run(*plain, "--beams", 5, "--n", 4)
    assert "sample 3: no sequence is left" in shown.stdout
    listed = parsed(run("tries", "list", *server))["tries"]
    assert sorted(trie["trie_id"] for trie in listed) == sorted(["t", ids["trie_id"]])
    assert parsed(run("tries", "get", *server, "t"))["trie"]["nodes"] == made["nodes"]
    assert parsed(run("tries", "delete", *server, "t")) == {}
    gone = run(*words)
    assert gone.returncode == 1 and "NOT_FOUND: trie 't' is not there" in gone.stderr
    assert run(*words, "--choice", "a").returncode == 2
    tokens.write_text("[1, -2]\n")
    assert run("tries", "upload", *server, "--file", tokens, "--tokens").returncode == 2
