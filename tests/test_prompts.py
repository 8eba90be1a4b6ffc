import json
import os
import re

import pytest

from ruitong_lib.errors import RuitongError
from ruitong_lib.prompts import Prompt, ids_sha256, load_prompts, render


class TestShipped:
    def test_core(self):
        core = load_prompts("core")
        assert core.name == "core"
        assert core.version
        assert len(core.prompts) >= 128
        assert len({p.id for p in core.prompts}) == len(core.prompts)
        assert len({p.text for p in core.prompts}) == len(core.prompts)
        assert all(p.text.strip() and p.category and p.language for p in core.prompts)
        assert {"en", "zh", "ru", "es"} <= {p.language for p in core.prompts}
        assert len({p.category for p in core.prompts}) >= 8

    def test_languages_are_what_they_say(self):
        core = load_prompts("core").prompts
        for language, letters in (("zh", "[一-鿿]"), ("ru", "[а-яА-Я]")):
            of = [p for p in core if p.language == language]
            assert len(of) >= 8
            assert all(re.search(letters, p.text) for p in of)
            assert all(p.id.startswith(f"{language}-") for p in of)

    def test_subsets_are_nested(self):
        ids = {n: [p.id for p in load_prompts(n).prompts] for n in ("core-16", "core-61", "core")}
        assert (len(ids["core-16"]), len(ids["core-61"])) == (16, 61)
        assert set(ids["core-16"]) < set(ids["core-61"]) < set(ids["core"])
        assert len({p.language for p in load_prompts("core-16").prompts}) >= 3
        by_id = {p.id: p for p in load_prompts("core").prompts}
        assert all(by_id[p.id] == p for p in load_prompts("core-61").prompts)

    def test_unknown_name(self):
        with pytest.raises(
            RuitongError, match=r"prompts must be one of core, .*got 'core-62'\. Did you mean 'core-61'\?"
        ):
            load_prompts("core-62")


class TestFiles:
    def load(self, tmp_path, text, name="mine.yml", subset=""):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return load_prompts(f"{path}{subset}")

    def test_yaml_mapping(self, tmp_path):
        found = self.load(
            tmp_path,
            "name: n\nversion: 3\nprompts:\n"
            "- {id: a, text: Hello, category: c, language: en, system: Be brief.}\n- prompt: 你好\n- Just text\n",
        )
        assert (found.name, found.version) == ("n", "3")
        assert found.prompts == (
            Prompt("a", "c", "en", "Hello", "Be brief."),
            Prompt("p0001", "", "", "你好"),
            Prompt("p0002", "", "", "Just text"),
        )

    def test_yaml_list_is_named_by_its_file(self, tmp_path):
        found = self.load(tmp_path, "- one\n- two\n")
        assert (found.name, found.version, len(found.prompts)) == ("mine", "", 2)

    def test_jsonl(self, tmp_path):
        found = self.load(tmp_path, '{"id": 7, "text": "x"}\n\n"plain"\n{"prompt": "y"}\n', "q.jsonl")
        assert [(p.id, p.text) for p in found.prompts] == [("7", "x"), ("p0001", "plain"), ("p0002", "y")]
        assert found.name == "q"

    @pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
    def test_jsonl_lines_end_at_newlines_alone(self, tmp_path, separator):
        # str.splitlines() would cut a text that holds one of these, as a JSON string may
        row = json.dumps({"text": f"one{separator}two"}, ensure_ascii=False)
        assert separator in row
        found = self.load(tmp_path, f"{row}\n{row}\n", "q.jsonl")
        assert [p.text for p in found.prompts] == [f"one{separator}two"] * 2

    def test_jsonl_with_windows_line_ends(self, tmp_path):
        path = tmp_path / "q.jsonl"
        path.write_bytes(b'{"text": "a"}\r\n{"text": "b"}\r\n')
        assert [p.text for p in load_prompts(str(path)).prompts] == ["a", "b"]

    @pytest.mark.parametrize("name", ["mine.yml", "mine.jsonl"])
    def test_null_is_nothing_not_the_word_none(self, tmp_path, name):
        row = '{"id": null, "text": "x", "system": null, "category": null, "language": null}'
        found = self.load(tmp_path, row if name.endswith("jsonl") else f"prompts: [{row}]", name)
        assert found.prompts == (Prompt("p0000", "", "", "x", ""),)

    def test_subsets_of_your_own(self, tmp_path):
        text = "prompts: [{id: 1, text: a}, {id: b, text: b}, {id: c, text: c}]\nsubsets: {few: [c, 1]}\n"
        found = self.load(tmp_path, text, subset="#few")
        assert found.name == "few"
        assert [p.id for p in found.prompts] == ["c", "1"]
        assert len(self.load(tmp_path, text).prompts) == 3

    def test_a_changed_file_is_read_again(self, tmp_path):
        assert self.load(tmp_path, "[a]").prompts[0].text == "a"
        (tmp_path / "mine.yml").write_text("[b]")
        os.utime(tmp_path / "mine.yml", ns=(1, 1))
        assert load_prompts(str(tmp_path / "mine.yml")).prompts[0].text == "b"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prompts: [{id: a, text: x}, {id: a, text: y}]", "two prompts have the id 'a'; ids must be unique"),
            ("prompts: [{id: p0001, text: x}, y]", "two prompts have the id 'p0001'"),
            ("prompts: [{id: a, text: '  '}]", "prompt 1 (a) has no text"),
            ("prompts: [x, {id: a}]", "prompt 2 (a) has no text"),
            ("prompts: [{text: 5}]", "prompt 1 (no id) has no text"),
            ("prompts: [5]", "prompt 1 must be a text or a mapping, got int"),
            ("prompts: []", "no prompts"),
            ("{a: 1}", "must hold a list of prompts, or a mapping with the key 'prompts'"),
            ("", "must hold a list of prompts"),
            ("just text", "must hold a list of prompts"),
            ("prompts: [", "is not valid yml"),
        ],
    )
    def test_errors_name_the_file(self, tmp_path, text, message):
        with pytest.raises(RuitongError, match=re.escape(message)) as e:
            self.load(tmp_path, text)
        assert "mine.yml" in str(e.value)

    @pytest.mark.parametrize(
        ("subset", "message"),
        [
            ("#fwe", "no subset 'fwe'; it names few. Did you mean 'few'?"),
            ("#bad", "subset bad names unknown prompts: z"),
        ],
    )
    def test_subset_errors(self, tmp_path, subset, message):
        few, bad = "few: [a]", "few: [a], bad: [a, z]"
        text = "prompts: [{id: a, text: a}]\nsubsets: {%s}\n" % (bad if subset == "#bad" else few)
        with pytest.raises(RuitongError, match=re.escape(message)):
            self.load(tmp_path, text, subset=subset)

    def test_no_subsets_at_all(self, tmp_path):
        for text in ("prompts: [a]", "prompts: [a]\nsubsets:\n"):
            with pytest.raises(RuitongError, match="no subset 'x'; it names none"):
                self.load(tmp_path, text, subset="#x")

    def test_bad_jsonl_names_the_file(self, tmp_path):
        with pytest.raises(RuitongError, match=r"q\.jsonl is not valid jsonl: "):
            self.load(tmp_path, '{"text": "a"}\n{"text": \n', "q.jsonl")

    def test_missing_and_undecodable(self, tmp_path):
        with pytest.raises(RuitongError, match=r"cannot read the prompts in .*none\.yml"):
            load_prompts(str(tmp_path / "none.yml"))
        (tmp_path / "x.yml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(RuitongError, match=r"cannot read the prompts in .*x\.yml"):
            load_prompts(str(tmp_path / "x.yml"))


class TestHash:
    def test_of_a_set(self, tmp_path):
        def sha(text):
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yml"
            path.write_text(text)
            return load_prompts(str(path)).sha256

        plain = sha("prompts: [{id: a, text: x}, {id: b, text: y}]")
        assert sha("name: other\nversion: 9\nprompts: [{id: a, text: x, category: c}, {id: b, text: y}]") == plain
        changed = [
            "prompts: [{id: a, text: x}, {id: b, text: z}]",
            "prompts: [{id: a, text: x}, {id: c, text: y}]",
            "prompts: [{id: a, text: x, system: s}, {id: b, text: y}]",
            "prompts: [{id: b, text: y}, {id: a, text: x}]",
            "prompts: [{id: a, text: x}]",
        ]
        assert len({plain, *map(sha, changed)}) == 6

    def test_of_ids(self):
        assert ids_sha256([1, 23]) == ids_sha256((1, 23))
        assert len({ids_sha256(x) for x in ([1, 23], [12, 3], [1, 2, 3], [23, 1], [123], [])}) == 6


PROMPTS = [Prompt("a", "", "en", "Hello"), Prompt("b", "", "zh", "你好，世界 😀", "Be brief.")]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_folder)


class TestRender:
    def test_the_template_and_the_thinking_switch(self, tokenizer):
        off, on = (render(PROMPTS, tokenizer, thinking=t) for t in (False, True))
        start = "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(on[0]) == start
        assert tokenizer.decode(off[0]) == start + "<think>\n\n</think>\n\n"
        assert render(PROMPTS, tokenizer) == off

    def test_system_message_and_any_script(self, tokenizer):
        text = tokenizer.decode(render(PROMPTS, tokenizer)[1])
        assert text.startswith("<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n你好，世界 😀<|im_end|>")

    def test_no_double_beginning_of_text(self, tokenizer):
        assert tokenizer.encode("x")[0] == tokenizer.bos_token_id  # the tokenizer writes one by itself
        for ids in render(PROMPTS, tokenizer):
            assert ids.count(tokenizer.bos_token_id) == 1
            assert ids[0] == tokenizer.bos_token_id
            assert all(type(i) is int for i in ids)

    def test_plain_text_without_a_template(self, tokenizer, monkeypatch):
        monkeypatch.setattr(tokenizer, "chat_template", None)
        one, two = render(PROMPTS, tokenizer, thinking=True)
        assert tokenizer.decode(one) == "<s>Hello"
        assert tokenizer.decode(two) == "<s>Be brief.\n你好，世界 😀"

    def test_enable_thinking_is_always_passed(self):
        class Recorder:
            chat_template = "x"
            asked: list = []  # noqa: RUF012

            def apply_chat_template(self, messages, **options):
                self.asked.append((messages, options))
                return "text"

            def encode(self, text, *, add_special_tokens):
                assert add_special_tokens is False
                return [1, 2]

        assert render(PROMPTS[1:], Recorder(), thinking=False) == [[1, 2]]
        (messages, options) = Recorder.asked[0]
        assert [m["role"] for m in messages] == ["system", "user"]
        assert options == {"add_generation_prompt": True, "tokenize": False, "enable_thinking": False}
