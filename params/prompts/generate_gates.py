"""Write ``gates.yml``: gate items of our own, from the word lists and templates below and a fixed seed.

Run it after a change here: ``python params/prompts/generate_gates.py``. A test compares the file with its output.
Sentences and lists are written for this file; no item comes from a benchmark. Raise ``VERSION`` when an item changes.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 20261130
VERSION = 1
Item = dict[str, Any]
LETTERS = ["A", "B", "C", "D"]

SENTIMENT = [
    ("The battery lasts two full days and the screen is a joy to look at.", 1),
    ("After a week the handle broke off, and nobody answered my letters.", 0),
    ("We waited an hour for cold soup and a bill with three mistakes.", 0),
    ("The staff carried our bags, smiled, and found us a quieter room.", 1),
    ("This umbrella has survived every storm since March.", 1),
    ("The zip jams every morning, and the lining already has a hole.", 0),
    ("I would buy these boots again without thinking twice.", 1),
    ("The map in the guide is wrong, so we walked in circles.", 0),
    ("A dull story, flat characters, and an ending that explains nothing.", 0),
    ("My daughter laughed through the whole play and asked to go again.", 1),
    ("The lamp flickers, hums, and smells of burnt plastic.", 0),
    ("Every page of this cookbook gave me a dinner that worked.", 1),
    ("The train was clean, on time, and half empty.", 1),
    ("They charged me twice and kept the deposit.", 0),
    ("The paint dried evenly and still looks fresh a year later.", 1),
    ("The keyboard loses letters, and the mouse pointer jumps.", 0),
    ("The lesson was clear, friendly, and worth every coin.", 1),
    ("The mattress sags so badly that my back hurts all day.", 0),
    ("Delivery took six weeks, and the box held the wrong chair.", 0),
    ("The tea is fragrant, and the tin keeps it that way.", 1),
    ("The concert hall has wonderful sound and comfortable seats.", 1),
    ("The app crashes whenever I open my own photographs.", 0),
    ("The gardener saved our old apple tree, and we are grateful.", 1),
    ("The soup was so salty that we left it standing.", 0),
]
TOPICS = ["sport", "cooking", "weather", "travel", "money"]
TOPIC = [
    ("The goalkeeper stopped two penalties in the last minutes.", 0),
    ("She won the sprint by the width of a hand.", 0),
    ("The cyclists climb three passes before the finish.", 0),
    ("Our team changed its coach after five defeats.", 0),
    ("Simmer the lentils with cumin for twenty minutes.", 1),
    ("Fold the egg whites into the batter with a spoon.", 1),
    ("Knead the dough until it no longer sticks to the bowl.", 1),
    ("Roast the peppers, then peel off the black skin.", 1),
    ("Thick fog will cover the valley until noon.", 2),
    ("A cold front brings hail to the northern coast.", 2),
    ("After weeks of drought, rain fell all night.", 2),
    ("The wind turns to the west and grows to a gale.", 2),
    ("The ferry to the island leaves from the second pier.", 3),
    ("We crossed the border by night bus and slept in a hostel.", 3),
    ("Pack light, for the path to the monastery has no road.", 3),
    ("Our visa was stamped at a small desk in the harbour.", 3),
    ("The bank raised its interest rate for savings again.", 4),
    ("He paid off the loan two years early.", 4),
    ("Prices of shares fell after the company cut its dividend.", 4),
    ("Write down each expense, and the budget makes itself.", 4),
]
INTENTS = ["question", "order", "complaint", "thanks"]
INTENT = [
    ("Which entrance is open on Sundays?", 0),
    ("How long does the blue paint need to dry?", 0),
    ("Do you also repair old clocks?", 0),
    ("Is the lake warm enough for swimming in May?", 0),
    ("Please send two boxes of candles to the library.", 1),
    ("I would like forty yellow folders, delivered on Friday.", 1),
    ("Put me down for one large loaf every Saturday.", 1),
    ("We take the small table in oak, and three chairs.", 1),
    ("The parcel arrived wet, and the vase is in pieces.", 2),
    ("For the third time the wrong newspaper was in our box.", 2),
    ("Your driver blocked our gate for two hours.", 2),
    ("The heating you repaired is cold again.", 2),
    ("You stayed late to help us, and we will not forget it.", 3),
    ("Many kind regards for the flowers; they made my week.", 3),
    ("What a generous gift, we are deeply grateful.", 3),
    ("Your quick help saved our wedding cake, bless you.", 3),
]
SENTIMENT_ZH = [
    ("这把椅子坐着很舒服，颜色也好看。", 1),
    ("等了一个小时，菜还是凉的。", 0),
    ("客服耐心又热情，问题马上解决了。", 1),
    ("用了三天就坏了，非常失望。", 0),
    ("房间干净明亮，窗外能看到湖。", 1),
    ("包装破了，里面的杯子全碎了。", 0),
    ("这本书写得生动，一口气就读完了。", 1),
    ("屏幕总是闪，眼睛很难受。", 0),
    ("老师讲得清楚，孩子进步很快。", 1),
    ("司机态度恶劣，还绕了远路。", 0),
    ("面条劲道，汤也鲜美。", 1),
    ("衣服洗了一次就掉色，太糟糕了。", 0),
    ("音乐会精彩极了，我们还想再去。", 1),
    ("说明书写错了，装了半天也装不上。", 0),
    ("这双鞋又轻又暖，值得买。", 1),
    ("声音太吵，晚上根本睡不着。", 0),
]
TOPICS_ZH = ["体育", "做饭", "天气", "旅行"]
TOPIC_ZH = [
    ("守门员在最后一分钟扑出了点球。", 0),
    ("她在百米赛跑中拿到了第一名。", 0),
    ("球队换了教练以后连赢三场。", 0),
    ("把豆腐切成小块，用小火慢慢煎。", 1),
    ("面团要揉到不粘手为止。", 1),
    ("汤里再加一点盐和葱花就好了。", 1),
    ("明天北方有大雪，气温下降十度。", 2),
    ("上午有雾，中午以后转晴。", 2),
    ("台风今晚登陆，沿海有暴雨。", 2),
    ("我们坐夜车去海边，住在小旅店里。", 3),
    ("去山上的寺庙要走两个小时的小路。", 3),
    ("护照办好了，下周就出发去看沙漠。", 3),
]
GROUPS = {
    "animals": ["otter", "badger", "heron", "lynx", "beaver", "falcon"],
    "tools": ["hammer", "chisel", "wrench", "saw", "pliers", "drill"],
    "fruits": ["plum", "cherry", "quince", "mango", "apricot", "pear"],
    "colours": ["crimson", "violet", "turquoise", "beige", "indigo", "scarlet"],
    "instruments": ["cello", "oboe", "trumpet", "harp", "banjo", "flute"],
    "clothes": ["jacket", "scarf", "glove", "sock", "apron", "vest"],
    "vehicles": ["tram", "canoe", "truck", "bicycle", "ferry", "wagon"],
    "metals": ["copper", "iron", "zinc", "silver", "nickel", "lead"],
}
GROUPS_ZH = {
    "动物": ["老虎", "兔子", "乌龟", "猴子"],
    "水果": ["苹果", "葡萄", "桃子", "西瓜"],
    "乐器": ["钢琴", "笛子", "二胡", "鼓"],
    "衣物": ["帽子", "手套", "裙子", "围巾"],
    "交通工具": ["火车", "轮船", "自行车", "飞机"],
    "文具": ["铅笔", "橡皮", "尺子", "毛笔"],
}
OPPOSITES = [
    ("shallow", "deep"), ("ancient", "modern"), ("rough", "smooth"), ("generous", "stingy"), ("arrive", "depart"),
    ("expand", "shrink"), ("humble", "proud"), ("scarce", "plentiful"), ("rigid", "flexible"), ("victory", "defeat"),
    ("dawn", "dusk"), ("drought", "flood"), ("gather", "scatter"), ("dull", "shiny"), ("timid", "bold"),
]  # fmt: skip
OPPOSITES_ZH = [
    ("高", "低"), ("快", "慢"), ("冷", "热"), ("早", "晚"), ("轻", "重"), ("宽", "窄"), ("软", "硬"), ("远", "近"),
]  # fmt: skip
NAMES = ["Mira", "Tomas", "Lena", "Oskar", "Priya", "Jonas", "Amara", "Felix", "Noor", "Ivo", "Selma", "Hugo"]
NAMES_ZH = ["小林", "小周", "阿明", "小雪", "老陈", "小芳", "大伟", "小杨"]
THINGS = ["lantern", "violin", "kettle", "compass", "basket", "hammer", "ladder", "telescope"]
THINGS_ZH = ["灯笼", "风筝", "雨伞", "篮子", "望远镜", "水壶"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
DAYS_ZH = [f"星期{c}" for c in "一二三四五六日"]
FACTS = [
    ("Is a trout a fish?", 1), ("Is a hammer a kind of fruit?", 0), ("Can a penguin fly across an ocean?", 0),
    ("Does ice melt when it is heated?", 1), ("Is a violin a string instrument?", 1),
    ("Do triangles have four sides?", 0), ("Is the Moon larger than the Sun?", 0), ("Is honey made by bees?", 1),
    ("Does iron float on water?", 0), ("Is winter usually colder than summer?", 1), ("Do cows lay eggs?", 0),
    ("Is a carrot a vegetable?", 1),
]  # fmt: skip
FACTS_ZH = [
    ("鱼生活在水里。", 1), ("太阳从西边升起。", 0), ("冰加热以后会融化。", 1), ("三角形有四条边。", 0),
    ("蜜蜂会酿蜜。", 1), ("石头比羽毛轻。", 0), ("一年有十二个月。", 1), ("猫会下蛋。", 0), ("一天有二十四小时。", 1),
    ("铁可以浮在水面上。", 0),
]  # fmt: skip
GOODS = ["apples", "stamps", "marbles", "candles", "tickets", "buttons", "shells", "postcards"]
GOODS_ZH = ["苹果", "邮票", "蜡烛", "贝壳", "本子", "糖果"]
CITIES = ["Lisbon", "Tartu", "Osaka", "Quito", "Bergen", "Nairobi", "Izmir", "Leeds"]
CITIES_ZH = ["成都", "厦门", "西安", "昆明", "青岛", "杭州"]
CODE = [
    ("double(x)", "returns x times two"), ("is_even(n)", "returns True when n is even"),
    ("area(width, height)", "returns the area of a rectangle"), ("last(items)", "returns the last element of a list"),
    ("join_words(words)", "joins a list of words with spaces"), ("celsius(f)", "converts Fahrenheit to Celsius"),
    ("count_a(text)", "counts the letter a in a text"), ("larger(a, b)", "returns the larger of two numbers"),
    ("shout(text)", "returns the text in capital letters"), ("mean(numbers)", "returns the mean of a list of numbers"),
    ("squares(n)", "returns the squares of 0 to n - 1"), ("initial(name)", "returns the first letter of a name"),
    ("minutes(hours)", "converts hours to minutes"), ("is_empty(items)", "returns True when a list is empty"),
    ("swap(pair)", "returns a pair in reverse order"), ("clip(x, low, high)", "limits x to the range from low to high"),
    ("only_positive(numbers)", "keeps the positive numbers of a list"), ("greet(name)", "returns a greeting"),
    ("power(base, exponent)", "returns base to the power of exponent"),
    ("distinct(items)", "removes repeated elements"),
]  # fmt: skip
CODE_ZH = [
    ("triple(x)", "返回 x 的三倍"), ("is_odd(n)", "n 为奇数时返回 True"), ("perimeter(a, b)", "返回长方形的周长"),
    ("first(items)", "返回列表的第一个元素"), ("total(numbers)", "返回数字列表的总和"),
    ("smaller(a, b)", "返回两个数中较小的一个"),
    ("reverse(text)", "把字符串倒过来"), ("seconds(minutes)", "把分钟换算成秒"),
]  # fmt: skip


def classification(rng: random.Random) -> Iterator[Item]:
    """Yield items that sort a sentence into one of a few named classes."""
    asks = (
        "Is this review positive or negative? Answer with one word.\n\n{}",
        "Review: {}\nClassify the review as positive or negative. Reply with the label only.",
        "Read the customer's sentence and name its sentiment, positive or negative, in one word: {}",
    )
    for i, (text, good) in enumerate(SENTIMENT):
        yield label("en", asks[i % 3].format(text), ["positive", "negative"], "positive" if good else "negative")
    asks = (
        "Topic of this sentence: sport, cooking, weather, travel or money? Answer with one word.\n\n{}",
        "Choose one label out of sport, cooking, weather, travel, money for: {}\nReply with the label only.",
    )
    for i, (text, topic) in enumerate(TOPIC):
        yield label("en", asks[i % 2].format(text), TOPICS, TOPICS[topic])
    asks = (
        "A shop received this message: {}\nIs it a question, an order, a complaint or thanks? Answer with one word.",
        "Sort the message into question, order, complaint or thanks. One word only.\n\nMessage: {}",
    )
    for i, (text, intent) in enumerate(INTENT):
        yield label("en", asks[i % 2].format(text), INTENTS, INTENTS[intent])
    words = rng.sample([w for g in GROUPS.values() for w in g], 24)
    for i, word in enumerate(words):
        group = next(g for g, members in GROUPS.items() if word in members)
        options = sorted([group, *rng.sample([g for g in GROUPS if g != group], 3)])
        shown = ", ".join(options)
        ask = (f"Which group does the word '{word}' belong to: {shown}? One word.",
               f"Groups: {shown}.\nWord: {word}\nReply with the name of its group only.")[i % 2]  # fmt: skip
        yield label("en", ask, options, group)
    asks = ("下面的评价是正面还是负面？只回答两个字。\n\n{}", "评价：{}\n请判断情感，只回答“正面”或“负面”。")
    for i, (text, good) in enumerate(SENTIMENT_ZH):
        yield label("zh", asks[i % 2].format(text), ["正面", "负面"], "正面" if good else "负面")
    asks = (
        "这句话的主题是体育、做饭、天气还是旅行？只回答一个词。\n\n{}",
        "句子：{}\n从体育、做饭、天气、旅行中选一个主题，只写主题。",
    )
    for i, (text, topic) in enumerate(TOPIC_ZH):
        yield label("zh", asks[i % 2].format(text), TOPICS_ZH, TOPICS_ZH[topic])


def choice(rng: random.Random) -> Iterator[Item]:
    """Yield questions with four lettered options."""
    for word, opposite in OPPOSITES:
        others = rng.sample([w for pair in OPPOSITES for w in pair if w not in {word, opposite}], 3)
        yield lettered(rng, "en", f"Which word means the opposite of '{word}'?", opposite, others)
    for group in [*GROUPS, *rng.sample(list(GROUPS), 6)]:
        other = rng.choice([g for g in GROUPS if g != group])
        odd = rng.choice(GROUPS[other])
        yield lettered(
            rng, "en", "Three of these belong together. Which one does not?", odd, rng.sample(GROUPS[group], 3)
        )
    for i in range(14):
        numbers = rng.sample(range(100, 1000), 4) if i % 2 else [x / 100 for x in rng.sample(range(101, 999), 4)]
        want, word = (max(numbers), "largest") if i % 4 < 2 else (min(numbers), "smallest")
        rest = [str(x) for x in numbers if x != want]
        yield lettered(rng, "en", f"Which of these numbers is the {word}?", str(want), rest)
    for _ in range(14):
        people, things = rng.sample(NAMES, 4), rng.sample(THINGS, 4)
        story = " ".join(f"{p} has the {t}." for p, t in zip(people, things, strict=True))
        i = rng.randrange(4)
        yield lettered(rng, "en", f"{story} Who has the {things[i]}?", people[i], [p for p in people if p != people[i]])
    for _ in range(12):
        start, step = rng.randrange(2, 30), rng.randrange(3, 12)
        shown = ", ".join(str(start + step * i) for i in range(4))
        nxt = start + 4 * step
        wrong = rng.sample([nxt - 2, nxt - 1, nxt + 1, nxt + 2, nxt + step], 3)
        yield lettered(rng, "en", f"Which number continues {shown}?", str(nxt), [str(w) for w in wrong])
    for _ in range(12):
        words = rng.sample(sorted({w for g in GROUPS.values() for w in g}), 4)
        first = min(words)
        ask = "Which of these words comes first in the alphabet?"
        yield lettered(rng, "en", ask, first, [w for w in words if w != first])
    for word, opposite in OPPOSITES_ZH:
        others = rng.sample([w for pair in OPPOSITES_ZH for w in pair if w not in {word, opposite}], 3)
        yield lettered(rng, "zh", f"“{word}”的反义词是哪一个？", opposite, others)
    for group, members in GROUPS_ZH.items():
        odd = rng.choice(rng.choice([m for g, m in GROUPS_ZH.items() if g != group]))
        yield lettered(rng, "zh", "下面哪一个和其他三个不是一类？", odd, rng.sample(members, 3))
    for i in range(8):
        numbers = rng.sample(range(1000, 10_000), 4)
        want, word = (max(numbers), "最大") if i % 2 else (min(numbers), "最小")
        yield lettered(rng, "zh", f"下面哪个数{word}？", str(want), [str(x) for x in numbers if x != want])
    for _ in range(8):
        people, things = rng.sample(NAMES_ZH, 4), rng.sample(THINGS_ZH, 4)
        story = "，".join(f"{p}拿着{t}" for p, t in zip(people, things, strict=True))
        i = rng.randrange(4)
        yield lettered(rng, "zh", f"{story}。谁拿着{things[i]}？", people[i], [p for p in people if p != people[i]])
    for _ in range(6):
        day, after = rng.randrange(7), rng.randrange(2, 6)
        right = DAYS_ZH[(day + after) % 7]
        rest = rng.sample([d for d in DAYS_ZH if d != right], 3)
        yield lettered(rng, "zh", f"今天是{DAYS_ZH[day]}，{after}天以后是星期几？", right, rest)


def truth(rng: random.Random) -> Iterator[Item]:
    """Yield questions that are answered with yes or no."""
    end = (" Answer yes or no.", "\nReply with yes or no only.", " Yes or no?")
    made = list(FACTS)
    for i in range(12):
        a, b = rng.sample(range(20, 1000), 2)
        more = bool(i % 2)
        made.append((f"Is {a} {'greater' if more else 'less'} than {b}?", int((a > b) == more)))
    for i in range(12):
        word = rng.choice(rng.choice(list(GROUPS.values())))
        inside = rng.choice(sorted(set(word))) if i % 2 else rng.choice(sorted(set("abcdefghiklmnoprstu") - set(word)))
        made.append((f"Does the word '{word}' contain the letter '{inside}'?", i % 2))
    for i in range(10):
        a, b = sorted(rng.sample(range(7), 2))
        if i % 2:
            a, b = b, a
        made.append((f"In a week that starts on Monday, does {DAYS[a]} come before {DAYS[b]}?", int(a < b)))
    for i in range(10):
        a, b = rng.randrange(6, 60), rng.randrange(6, 60)
        made.append((f"Is it true that {a} + {b} = {a + b + (0 if i % 2 else rng.choice([-2, -1, 1, 10]))}?", i % 2))
    for i, (ask, yes) in enumerate(made):
        yield item("truth", "en", ask + end[i % 3], "label", "yes" if yes else "no", options=["yes", "no"])
    made = list(FACTS_ZH)
    for i in range(8):
        a, b = rng.sample(range(20, 1000), 2)
        made.append((f"{a} 比 {b} {'大' if i % 2 else '小'}。", int((a > b) == bool(i % 2))))
    for i in range(8):
        a, b = rng.randrange(6, 60), rng.randrange(6, 60)
        made.append((f"{a} 加 {b} 等于 {a + b + (0 if i % 2 else rng.choice([-2, -1, 1, 10]))}。", i % 2))
    for ask, yes in made:
        text = f"判断对错，只回答“对”或“错”：{ask}"
        yield item("truth", "zh", text, "label", "对" if yes else "错", options=["对", "错"])


def numeric(rng: random.Random) -> Iterator[Item]:
    """Yield problems whose answer is a number; some have one digit, and then the digits are the options."""
    digits = [str(i) for i in range(10)]
    for i in range(28):
        name, goods = rng.choice(NAMES), rng.choice(GOODS)
        a = rng.randrange(4, 10)
        b = rng.randrange(1, a)
        asks = (
            (f"{name} has {a} {goods} and gives {b} away. How many are left?", a - b),
            (f"A box holds {a} {goods}. {b} are broken. How many are whole?", a - b),
            (f"{a * b} {goods} are shared equally by {b} children. How many does each child get?", a),
            (f"What is {a} minus {b}?", a - b),
        )
        ask, value = asks[i % 4]
        yield item("numeric", "en", f"{ask} Answer with one digit.", "number", value, options=digits)
    for i in range(24):
        name, goods = rng.choice(NAMES), rng.choice(GOODS)
        a, b, c = rng.randrange(12, 90), rng.randrange(3, 12), rng.randrange(2, 9)
        asks = (
            (f"{name} buys {b} bags with {a} {goods} each. How many {goods} is that?", a * b),
            (f"{name} had {a} {goods}, found {b} more, and then lost {c}. How many remain?", a + b - c),
            (
                f"A train leaves at {c}:00 and arrives {a} minutes after {c + 3}:00. How many minutes does it travel?",
                180 + a,
            ),
            (
                f"One ticket costs {b} euros and a guide costs {a} euros. What do {c} tickets and one guide cost?",
                b * c + a,
            ),
            (f"What is {a} + {b * 10}?", a + b * 10),
            (f"Add {a * 37} and {b * 411}.", a * 37 + b * 411),
        )
        ask, value = asks[i % 6]
        yield item("numeric", "en", f"{ask} Answer with the number only.", "number", value)
    for i in range(12):
        a, b = rng.randrange(21, 99), rng.randrange(3, 9)
        asks = (
            (f"A rope of {a} metres is cut into {b} equal pieces. How long is one piece, in metres?", a / b),
            (f"A car drives {a} km in {b} hours. What is its mean speed in km/h?", a / b),
            (f"What is {b} percent of {a}?", a * b / 100),
        )
        ask, value = asks[i % 3]
        text = f"{ask} Round to one decimal and answer with the number only."
        yield item("numeric", "en", text, "number", f"{value:.1f}", tolerance=0.1)
    for i in range(16):
        name, goods = rng.choice(NAMES_ZH), rng.choice(GOODS_ZH)
        a = rng.randrange(4, 10)
        b = rng.randrange(1, a)
        asks = (
            (f"{name}有{a}个{goods}，送出{b}个，还剩几个？", a - b),
            (f"{a * b}个{goods}平均分给{b}个人，每人几个？", a),
        )
        ask, value = asks[i % 2]
        yield item("numeric", "zh", f"{ask}只回答一个阿拉伯数字。", "number", value, options=digits)
    for i in range(16):
        a, b = rng.randrange(12, 90), rng.randrange(3, 12)
        asks = (
            (f"一箱有{a}个{rng.choice(GOODS_ZH)}，{b}箱一共有多少个？只回答数字。", a * b),
            (f"{a} 加 {b * 10} 等于多少？只回答数字。", a + b * 10),
            (f"{a} 加 {b} 等于多少？请用中文数字回答。", a + b),
            (f"一本书{a}元，一支笔{b}元，各买一件要多少元？只回答数字。", a + b),
        )
        ask, value = asks[i % 4]
        yield item("numeric", "zh", ask, "number", value)


def extraction(rng: random.Random) -> Iterator[Item]:
    """Yield texts out of which one string, or a few fields as JSON, has to be taken."""
    for i in range(24):
        name, city = rng.choice(NAMES), rng.choice(CITIES)
        code = f"{rng.choice('ABCDEFGH')}{rng.choice('KLMNPQRST')}-{rng.randrange(1000, 10_000)}"
        date = f"20{rng.randrange(10, 40)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
        mail = f"{name.lower()}@{rng.choice(['harbour', 'orchard', 'museum'])}.example"
        clock = f"{rng.randrange(8, 20):02}:{rng.choice([5, 15, 25, 35, 45]):02}"
        asks = (
            ("order code", code, r"\b[A-Z]{2}-\d{4}\b", f"{name} from {city} asks about order {code}, which is late."),
            ("date", date, r"\b\d{4}-\d{2}-\d{2}\b", f"The bridge in {city} was opened on {date} by {name}."),
            ("e-mail address", mail, r"\b[a-z]+@[a-z]+\.example\b", f"Write to {name} in {city} ({mail}) before noon."),
            (
                "departure time",
                clock,
                r"\b\d{2}:\d{2}\b",
                f"The bus to {city} leaves at {clock} and is driven by {name}.",
            ),
        )
        what, key, pattern, text = asks[i % 4]
        ask = (f"Text: {text}\nCopy the {what} from the text. Write nothing else.",
               f"What is the {what} in this text? Answer with it alone.\n\n{text}")[i // 4 % 2]  # fmt: skip
        yield item("extraction", "en", ask, "pattern", key, pattern=pattern)
    for i in range(12):
        name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randrange(19, 80)
        thing, price = rng.choice(THINGS), rng.randrange(5, 90)
        if i % 2:
            text, fields = f"{name}, {age} years old, lives in {city}.", {"name": name, "age": age, "city": city}
        else:
            text, fields = f"The {thing} costs {price} euros in {city}.", {"item": thing, "price": price}
        ask = f"Return one JSON object with the keys {', '.join(fields)} for this text, and nothing else.\n\n{text}"
        yield item("extraction", "en", ask, "json", json.dumps(fields))
    for city in rng.sample(CITIES, 6):
        name = rng.choice(NAMES)
        text = f"{name} moved to {city} after the war and opened a small shop."
        ask = f"{text}\n\nWhich city is named? Write the name of the city only."
        yield item("extraction", "en", ask, "exact", city)
    for i in range(12):
        name, city, age = rng.choice(NAMES_ZH), rng.choice(CITIES_ZH), rng.randrange(19, 80)
        code = f"{rng.choice('ABCDEFGH')}{rng.choice('KLMNPQRST')}-{rng.randrange(1000, 10_000)}"
        if i % 3 == 0:
            ask = f"{name}住在{city}，他的订单号是{code}。\n请只写出订单号。"
            yield item("extraction", "zh", ask, "pattern", code, pattern=r"[A-Z]{2}-\d{4}")
        elif i % 3 == 1:
            ask = f"{name}今年{age}岁，住在{city}。\n请用 JSON 返回 name、age、city 三个字段，不要写别的。"
            fields = {"name": name, "age": age, "city": city}
            yield item("extraction", "zh", ask, "json", json.dumps(fields, ensure_ascii=False))
        else:
            ask = f"{name}去年搬到{city}，开了一家小店。\n文中提到了哪个城市？只写城市名。"
            yield item("extraction", "zh", ask, "exact", city)


def code(_: random.Random) -> Iterator[Item]:
    """Yield small functions to write; the answer is that they parse, and their signature."""
    for i, (signature, does) in enumerate(CODE):
        ask = (f"Write the Python function {signature} that {does}. Code only, no explanation, no comments.",
               f"Give me only the Python code of {signature}. It {does}.")[i % 2]  # fmt: skip
        yield item("code", "en", ask, "python", signature)
    for signature, does in CODE_ZH:
        yield item("code", "zh", f"写一个 Python 函数 {signature}，{does}。只写代码，不要解释。", "python", signature)


def item(gate: str, language: str, text: str, parser: str, key: Any, **more: Any) -> Item:
    """Return one item; its id is added by :func:`build`."""
    return {"gate": gate, "language": language, "text": text, "parser": parser, **more, "key": str(key)}


def label(language: str, text: str, options: list[str], key: str) -> Item:
    """Return a classification item."""
    return item("classification", language, text, "label", key, options=options)


def lettered(rng: random.Random, language: str, ask: str, right: str, wrong: list[str]) -> Item:
    """Return a multiple-choice item with its options in a drawn order."""
    answers = [right, *wrong]
    rng.shuffle(answers)
    lines = "\n".join(f"{letter}. {a}" for letter, a in zip(LETTERS, answers, strict=True))
    end = "Answer with the letter only." if language == "en" else "只回答字母。"
    key = LETTERS[answers.index(right)]
    return item("choice", language, f"{ask}\n{lines}\n{end}", "choice", key, options=LETTERS)


def build() -> dict[str, Any]:
    """Return the document: every item once, with its id, and the subsets."""
    items: list[Item] = []
    for made in (classification, choice, truth, numeric, extraction, code):
        seen: dict[str, int] = {}
        texts: set[str] = set()
        for row in made(random.Random(f"{SEED} {made.__name__}")):
            if row["text"] in texts:
                continue
            texts.add(row["text"])
            n = seen[row["language"]] = seen.get(row["language"], 0) + 1
            items.append({"id": f"gate-{row['gate']}-{row['language']}-{n:03}", **row})
    return {"items": items, "subsets": {"gates-60": subset(items, 60), "gates-12": subset(items, 12)}}


def subset(items: list[Item], n: int) -> list[str]:
    """Return n ids with the gates in turn, spread over each gate, in the order of the file."""
    gates = list(dict.fromkeys(i["gate"] for i in items))
    chosen: set[str] = set()
    for k, gate in enumerate(gates):
        own = [i["id"] for i in items if i["gate"] == gate]
        share = n // len(gates) + (k < n % len(gates))
        chosen |= {own[j * len(own) // share] for j in range(share)}
    return [i["id"] for i in items if i["id"] in chosen]


def text() -> str:
    """Return the file: one item a line, as JSON, which is YAML too."""
    built = build()
    lines = [
        "# Made by generate_gates.py with a fixed seed; change that file, not this one.",
        "name: gates",
        f"version: {VERSION}",
        "license: Apache-2.0",
        "description: >-",
        "  Small tasks with an answer that a parser can read: classification, multiple choice, yes or no, numbers,",
        "  extraction, code. English and Chinese. Items with options have a constrained form too.",
        "subsets:",
        *(f"  {name}: {json.dumps(ids)}" for name, ids in built["subsets"].items()),
        "prompts:",
        *(f"- {json.dumps(i, ensure_ascii=False)}" for i in built["items"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("gates.yml").write_text(text(), encoding="utf-8")
