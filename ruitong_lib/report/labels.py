"""The words of a figure: in English, or in Chinese where a font for it is installed; Latin where there is none."""

import contextlib
import functools
import re

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator

from ruitong_lib.errors import RuitongError

LATIN = "DejaVu Sans"  # ships with matplotlib; it has Latin, Greek, Cyrillic and the arrows, but no Chinese
CJK = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans GB",
    "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback",
)  # fmt: skip
_FILES = re.compile(r"CJK|NotoSansSC|SourceHanSans|PingFang|Hiragino|msyh|simhei|wqy|DroidSansFallback", re.IGNORECASE)
LANGUAGES = ("en", "zh")
_language = "en"

# Whole phrases, not words: a longer one is tried first. Names of parameters, precisions and units stay as they are.
ZH = {
    "95 % interval, bootstrap over prompts": "95 % 区间，对提示词自助抽样",
    "Divergence, decode": "文本分歧，解码",
    "KL by prompt and position": "各提示词、各位置的 KL",
    "Noise-floor ladder": "噪声底阶梯",
    "Replay against decode": "重放与解码对照",
    "at risk": "（分歧前，含首个分歧）",
    "attention": "注意力实现",
    "bar": "横线",
    "band": "色带",
    "batch composition": "批次组成",
    "batch size": "批大小",
    "below": "低于",
    "best": "最佳",
    "bins of": "每格至少",
    "bit-identical": "逐位相同",
    "both ended alike": "两侧同样结束",
    "coarser precision of the pair": "一对中较粗的精度",
    "dashed: delta / floor over all": "虚线：总的 差异/噪声底",
    "dashed: delta of": "虚线：差异，",
    "decode": "解码",
    "delta": "差异",
    "delta 0": "差异为 0",
    "delta 0 everywhere": "处处差异为 0",
    "dotted: resolution of a shard": "点线：数据分片的分辨率",
    "drawn at": "画在",
    "engine": "引擎",
    "floor": "噪声底",
    "floor below resolution": "噪声底低于分辨率",
    "grey: not compared": "灰色：未比较",
    "hardware": "硬件",
    "identical": "相同",
    "its floor by the rule": "按规则选定的噪声底",
    "kernels": "计算内核",
    "line: the floor's mean": "线：噪声底均值",
    "mean": "均值",
    "mean KL": "平均 KL",
    "mean KL of a prompt": "单个提示词的平均 KL",
    "median": "中位数",
    "mixed": "混合",
    "no cap": "无上限",
    "no common positions": "无共同位置",
    "no interval": "无区间",
    "none": "无",
    "on the lower edge": "画在下缘",
    "open": "空心",
    "p99": "p99",
    "phase": "阶段",
    "position": "位置",
    "positions": "个位置",
    "precision": "精度",
    "prompt's delta / floor": "各提示词的 差异/噪声底",
    "prompts": "个提示词",
    "rank among the anchor's top": "排名，取锚文本前",
    "rank among the reference's top": "排名，取参考前",
    "ratio not defined": "比值无定义",
    "reference's probability": "参考的概率",
    "replay": "重放",
    "rerun": "重跑",
    "ring": "圆圈",
    "share of prompts": "提示词比例",
    "texts differ": "文本不同",
    "the delta between cells that differ in one thing that should not matter": "只差一项无关紧要设置的单元之间的差异",
    "threads": "线程数",
    "tokens generated": "已生成的 token 数",
    "too few prompts": "提示词太少",
    "values or more": "个值",
    "where texts agree so far": "仅取此前文本一致的位置",
    "|Δlogprob|": "|Δlogprob|",
}
_PHRASE = re.compile(
    "|".join(rf"(?<![\w-]){re.escape(p)}(?![\w-])" for p in sorted(ZH, key=len, reverse=True)), re.ASCII
)


def set_language(code: str) -> str:
    """Draw further figures in "en" or "zh" and return the language before; Chinese needs a font, else it is English."""
    global _language
    if code not in LANGUAGES:
        raise RuitongError(f"language must be one of {', '.join(LANGUAGES)}, got {code!r}")
    before, _language = _language, code
    return before


@functools.cache
def cjk_font() -> str:
    """Return the first installed font family of ``CJK``; empty where there is none.

    A font that was installed after matplotlib had made its list is found too.
    """
    known = set(font_manager.fontManager.get_font_names())
    if known.isdisjoint(CJK):
        for path in font_manager.findSystemFonts():
            if _FILES.search(path):
                with contextlib.suppress(Exception):  # a damaged font of someone's system is no reason to stop
                    font_manager.fontManager.addfont(path)
        known = set(font_manager.fontManager.get_font_names())
    return next((f for f in CJK if f in known), "")


def said(text: str) -> str:
    """Return a label in the chosen language."""
    if _language == "en" or not cjk_font():
        return text
    text = _PHRASE.sub(lambda m: ZH[m.group()], text)
    for latin, chinese in ((": ", "："), ("; ", "；"), (", ", "，")):
        text = text.replace(latin, chinese)
    return re.sub("([：；，]) +", r"\1", text)


@functools.cache
def _latin() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont(LATIN)).get_charmap())


def foreign(text: str) -> bool:
    """Whether a text has characters that the Latin font lacks."""
    return any(ord(c) not in _latin() for c in text if c != "\n")


def drawable(text: str) -> str:
    r"""Return ``text``; where it would need a font that is not here, its characters as ``\uXXXX``, never as boxes."""
    if not foreign(text) or cjk_font():
        return text
    return "".join(c if c == "\n" or ord(c) in _latin() else c.encode("unicode_escape").decode() for c in text)


def fit(figure: Figure) -> None:
    """Put every text of a finished figure into the chosen language and into a font that has its characters."""
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    for axis in axes:
        if not isinstance(axis.get_major_locator(), FixedLocator):
            continue  # a number: it is written anew at each drawing, and needs no other font
        before = [t.get_text() for t in axis.get_ticklabels()]
        words = [drawable(said(s)) for s in before]
        if words != before:
            axis.set_ticklabels(words)
    for text in figure.findobj(Text):
        word = drawable(said(text.get_text()))
        if word != text.get_text():
            text.set_text(word)
        if foreign(word):
            text.set_fontfamily([LATIN, cjk_font()])


def needs_cjk(figure: Figure) -> bool:
    """Whether a figure has text outside the Latin font."""
    return any(foreign(t.get_text()) for t in figure.findobj(Text))
