"""The report page in a real browser: what it shows is what the data says, and it asks for nothing but itself."""

import copy
import html.parser
import itertools
import json
import math
import shutil

import numpy as np
import pytest

from minigpt_jax.inspect.report import render_report

V, R, T, K = 24, 5, 9, 4
TEXTS = ["</script>", "<b>", '"', "&amp;", "\n", " ", "\u2028", "é", "😀", "", "<!--", "{{data}}", "the", "The", " the"]
TEXTS += ["a", "bee", "\t", "w" * 60, "\ud800", "#3", "\u0301", "don't", "-->"]
SHOWN = {"\n": "⏎", " ": "␣", "\u2028": "U+2028", "\t": "⇥", " the": "␣the", "\ud800": "U+D800", "\u0301": "◌\u0301"}
NO_TOKEN = TEXTS.index("")
DASH = "\u2013"

MISSING = "needs a browser: pip install playwright, and Chromium or Google Chrome on the PATH"
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGS += ["--disable-component-update", "--disable-sync"]

SECTIONS = {
    "Loss curve": ["loss"],
    "Parameters": ["params"],
    "The tied gradient": ["tied", "gradient"],
    "Token by token": ["tokens"],
    "Logit lens": ["lens", "tuned"],
    "Nearest neighbours": ["neighbours"],
    "Geometry of E": ["singular_values", "consistency"],
}


def shown(id):
    return SHOWN.get(TEXTS[id], TEXTS[id]) or f"#{id}"


def minus(text):
    return text.replace("-", "\u2212")


def lens(rng):
    probs = np.sort(rng.dirichlet(np.ones(K + 3), (R, T)))[..., :-4:-1]
    probs = np.concatenate([probs, 1e-5 * rng.random((R, T, K - 3))], -1)
    ids = np.array([[rng.permutation(V)[:K] for _ in range(T)] for _ in range(R)])
    targets = [5, 0, 4, 9, 1, 8, 15, 16, None]
    for t in (1, 4, 6):
        ids[-1, t] = [targets[t], *(v for v in ids[-1, t] if v != targets[t])][:K]
    kl = rng.random((R, T)) * 9
    kl[-1] = 0
    rank_target = rng.integers(0, V, (R, T)).tolist()
    for row in rank_target:
        row[-1] = None
    return {
        "prompt": "some <b>text</b>\n",
        "ids": [12, 5, 0, 4, 9, 1, 8, 15, 16],
        "targets": targets,
        "points": ["embed", *(f"block_{i}/ffn" for i in range(R - 1))],
        "top_ids": ids.tolist(),
        "top_probs": probs.tolist(),
        "entropy": (rng.random((R, T)) * 4).tolist(),
        "kl": kl.tolist(),
        "rank_target": rank_target,
        "rank_input": rng.integers(0, V, (R, T)).tolist(),
    }


def tied_record(rng, **more):
    names = [
        f"{part}_{norm}" for norm in ("l2", "l2_squared", "l1") for part in ("lookup", "head", "sum", "head_share")
    ]
    names = [name if "share" not in name else "head_share_" + name.split("share_")[1] for name in names]
    cosines = {name: float(rng.uniform(-1, 1)) for name in ("cosine", "inner_product")}
    return {**{name: float(rng.random()) for name in names}, **cosines, "lookup_rows": 17, **more}


def make_data():
    rng = np.random.default_rng(3)
    updates = ("update_cosine_lookup", "update_cosine_head", "update_cosine_sum")
    rows = [
        ("embed/embedding", [V, 6], "lookup, head"),
        ("block_0/ffn/up/kernel", [6, 30], ""),
        ("norm/scale", [6], ""),
    ]
    listed = [v for v in range(V) if v != NO_TOKEN]
    counts = rng.permutation(5000)[:V]
    near = np.array([[u for u in rng.permutation(V) if u != v][:6] for v in range(V)])
    return {
        "title": "runs/<demo> {{data}}",
        "made": "2026-11-30 03:20",
        "version": "0.1.0",
        "step": 5000,
        "summary": [["parameters", "103,680"], ["held-out loss", "1.747 nats, 2.520 bits per character"]],
        "notes": ["1 row has <no> token"],
        "texts": TEXTS,
        "unit": "character",
        "loss": {
            "train": [[step, 2 + 2 * math.exp(-step / 30)] for step in range(1, 121)],
            "val": [[step, 2.1 + 2 * math.exp(-step / 30)] for step in (30, 60, 90, 120)],
            "bits_per_nat": 1.4427,
        },
        "params": {
            "total": 330,
            "embedding": 144,
            "rows": [
                {"path": path, "shape": shape, "count": math.prod(shape), "bytes": 4 * math.prod(shape)}
                | {"used_by": used_by, "l2": 3.25, "rms": 0.03125, "max": 0.5, "share": share}
                for (path, shape, used_by), share in zip(rows, (0.5, 0.4, 0.1), strict=True)
            ],
        },
        "tied": [
            tied_record(rng, step=step, **{name: float(rng.uniform(-1, 1)) for name in updates})
            for step in (0, 1, 2, 5, 10, 20, 50, 120)
        ],
        "gradient": {"source": "2,048 held-out tokens", "stats": tied_record(rng)},
        "tokens": [
            {
                "id": v,
                "inputs": 0 if v == 7 else int(rng.integers(1, 90)),
                "targets": 0 if v == 7 else int(rng.integers(1, 90)),
                "lookup_l2": float(rng.random()) * (v != 7),
                "head_l2": float(rng.random()),
                "cosine": None if v == 7 else float(rng.uniform(-1, 1)),
                "softmax_only": v == 7,
                "row_norm": float(rng.random()) + 0.5,
                "train_count": 0 if v == 7 else int(counts[v]),
            }
            for v in listed
        ],
        "lens": lens(rng),
        "tuned": lens(rng),
        "neighbours": {
            "ids": near[listed].tolist(),
            "cosines": (-np.sort(-rng.uniform(-0.2, 1, (len(listed), 6)))).tolist(),
            "of": listed,
        },
        "consistency": {"share": 21 / 23, "failures": [[0, 1], [6, 7]]},
        "singular_values": [9.5, 4.0, 1.5, 0.25, 0.01, 0.0],
    }


@pytest.fixture
def data():
    return make_data()


@pytest.fixture(scope="module")
def tab():
    """One page of one browser, since a new one takes longer than most tests, and the list of what goes wrong in it."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip(MISSING)
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        page, problems = browser.new_page(), []
        page.set_default_timeout(5000)
        page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(f"a request: {request.url}"))
        yield page, problems
        browser.close()


@pytest.fixture
def show(tab, tmp_path):
    """`show(data, width=..., scheme=...)` opens the page; after the test, nothing has gone wrong in any of them."""
    page, problems = tab
    problems.clear()
    expected = []

    def show(data, width=1280, scheme="light"):
        file = tmp_path / f"{len(expected)}.html"
        file.write_text(render_report(data), encoding="utf-8")
        expected.append(f"a request: {file.as_uri()}")
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(file.as_uri())
        return page

    yield show
    page.evaluate("0")
    assert problems == expected


def texts_of(locator):
    return [text.strip() for text in locator.all_text_contents()]


def headings(page):
    return texts_of(page.locator("section h2"))


# --- the file


class Scripts(html.parser.HTMLParser):
    """The texts of script elements, by type."""

    def __init__(self):
        super().__init__()
        self.found, self.open = [], False

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self.found.append([dict(attrs).get("type"), ""])
            self.open = True

    def handle_endtag(self, tag):
        self.open = self.open and tag != "script"

    def handle_data(self, text):
        if self.open:
            self.found[-1][1] += text


def test_the_data_script_is_the_data_whatever_its_texts(data):
    data["loss"]["train"][3][1] = math.nan
    data["tokens"][0]["cosine"] = -math.inf
    expected = copy.deepcopy(data)
    expected["loss"]["train"][3][1] = expected["tokens"][0]["cosine"] = None
    parser = Scripts()
    page = render_report(data)
    parser.feed(page)
    assert [kind for kind, _ in parser.found] == ["application/json", None]
    assert json.loads(parser.found[0][1]) == expected
    assert not set("<>&\u2028\u2029\ud800") & set(parser.found[0][1])
    assert data["tokens"][0]["cosine"] == -math.inf, "the caller's dict is not changed"
    page.encode("utf-8")
    assert "</script" not in parser.found[1][1] and "<title>runs/&lt;demo&gt; {{data}}</title>" in page


def test_the_file_needs_nothing_outside_it(data):
    page = render_report(data)
    assert "default-src 'none'" in page
    for outside in ("http://", "https://", "@import", "url(", "src="):
        assert outside not in page.replace("http://www.w3.org/2000/svg", ""), outside


# --- the whole page


def test_every_section_and_the_header(show, data):
    page = show(data)
    assert headings(page) == list(SECTIONS)
    assert page.inner_text("h1") == data["title"] and page.title() == data["title"]
    assert page.inner_text("#made") == "step 5,000 · minigpt_jax 0.1.0 · 2026-11-30 03:20"
    assert texts_of(page.locator("#notes li")) == data["notes"]
    assert texts_of(page.locator("#summary dt, #summary dd")) == [text for pair in data["summary"] for text in pair]
    targets = [link.get_attribute("href") for link in page.locator("#toc a").all()]
    assert targets == ["#loss", "#params", "#tied", "#tokens", "#lens", "#neighbours", "#geometry"]
    assert page.locator("section b:text-is('b'), section script").count() == 0
    labels = page.locator("svg[role=img]").evaluate_all("all => all.map((svg) => svg.getAttribute('aria-label'))")
    assert len(labels) == 7 and all(any(c.isdigit() for c in label) for label in labels), labels


@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
def test_sections_without_data_are_left_out(show, data, absent):
    for heading, keys in SECTIONS.items():
        part = {**data, **dict.fromkeys(keys)}
        page = show({k: v for k, v in part.items() if not absent or v is not None})
        assert headings(page) == [other for other in SECTIONS if other != heading]
        assert page.locator("#toc a").count() == len(SECTIONS) - 1


def test_half_sections(show, data):
    for key, gone, kept in [
        ("tied", "#tied-charts", "#gradient-tables table"),
        ("gradient", "#gradient", "#tied-share svg"),
        ("lens", "#nothing", "#lens-grid"),
        ("tuned", "#lens-kind:visible", "#lens-grid"),
        ("singular_values", "#singular-part", "#consistency-result .token"),
        ("consistency", "#consistency", "#singular-chart svg"),
    ]:
        page = show({**data, key: None})
        assert page.locator(gone).count() == 0 and page.locator(kept).count() > 0, key


def test_nothing_but_a_title(show):
    page = show({"title": "bare"})
    assert headings(page) == [] and page.inner_text("h1") == "bare"


def test_without_texts_tokens_go_by_number(show, data):
    page = show({**data, "texts": None})
    assert page.inner_text("#lens-grid td[data-layer='0'][data-position='0']") == f"#{data['lens']['top_ids'][0][0][0]}"


BAD_ATTRIBUTE = """() => [...document.querySelectorAll('svg, svg *')].flatMap((node) => [...node.attributes])
    .map((attribute) => attribute.value).filter((value) => /NaN|undefined|null|Infinity/.test(value))"""


def test_little_data(show, data):
    little = copy.deepcopy(data)
    little |= {"notes": [], "summary": [], "tied": data["tied"][:1], "singular_values": [0.5]}
    little["loss"] = {"train": [[1, 4.2]], "val": [], "bits_per_nat": None}
    for row in little["tokens"]:
        row |= {"cosine": None, "train_count": 0}
    for row in (*little["tied"], little["gradient"]["stats"]):
        row |= {"cosine": None, "update_cosine_lookup": math.nan, "head_share_l1": None, "lookup_l1": 0.0}
    for key in ("kl", "rank_target", "rank_input"):
        little["lens"][key] = [[None] * T] * R
    for part in (little, data):
        page = show(part)
        page.locator("#tied-norm input[value=l1]").check()
        page.locator("#tied-log").uncheck()
        for chart in page.locator("svg[role=img]").all():
            chart.focus()
            page.keyboard.press("ArrowLeft")
        assert page.evaluate(BAD_ATTRIBUTE) == []
        assert "NaN" not in page.inner_text("body") and "undefined" not in page.inner_text("body")
        assert page.locator(".failed").count() == 0


def test_one_held_out_point_and_no_training(show, data):
    page = show({**data, "loss": {"train": [], "val": [[7, 1.5]], "bits_per_nat": 1.4427}})
    assert page.locator("#loss-chart circle").count() == 1 and page.evaluate(BAD_ATTRIBUTE) == []


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_never_scrolls_sideways(show, data, width):
    data["title"] = data["notes"][0] = data["summary"][0][1] = "runs/" + 30 * "long_name"
    page = show(data, width=width)
    wide = "document.scrollingElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(wide)
    page.locator("#loss-chart svg").focus()
    page.locator("#lens-grid td").last.focus()
    assert page.evaluate(wide)
    page.set_viewport_size({"width": 2000 - width, "height": 900})
    page.wait_for_function(f"""width => [...document.querySelectorAll('.chart svg')].every((svg) =>
        Number(svg.getAttribute('width')) === Math.floor(svg.parentNode.clientWidth)) && {wide}""")


def luminance(colour):
    channels = [float(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(pair):
    dark, light = sorted(map(luminance, pair))
    return (light + 0.05) / (dark + 0.05)


# Of a node with text of its own, its colour and the first background that is painted behind it.
COLOURS = """all => all.filter((node) => [...node.childNodes].some((child) => child.nodeType === 3)).map((node) => {
    let behind = node;
    while (behind && getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    return [getComputedStyle(node).color, getComputedStyle(behind).backgroundColor];
})"""


def test_light_and_dark_are_both_readable(show, data):
    page = show(data)
    backgrounds = {}
    everywhere = "h1, h2, p, th, td, dt, dd, label, button, .hint, .token, .choice span, .tag, li, a, output"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
        body = page.locator("body").evaluate_all(COLOURS)[0]
        backgrounds[scheme] = body[1]
        assert contrast(body) >= 4.5
        for kind in ("probability", "kl", "entropy", "rank_target", "rank_input"):
            page.locator("#lens-colour").select_option(kind)
            cells = page.locator("#lens-grid td").evaluate_all(COLOURS)
            assert len(cells) == R * T and len(set(map(tuple, cells))) >= 10
            assert min(map(contrast, cells)) >= 4.5
        pairs = page.locator(everywhere).evaluate_all(COLOURS)
        assert len(pairs) > 200 and min(map(contrast, pairs)) >= 4.5
        ticks = page.locator(".chart text").evaluate_all("all => all.map((node) => getComputedStyle(node).fill)")
        assert min(contrast((tick, body[1])) for tick in ticks) >= 4.5
    assert backgrounds["light"] != backgrounds["dark"]
    page.locator("#theme input[value=light]").check()
    assert page.locator("body").evaluate_all(COLOURS)[0][1] == backgrounds["light"], "chosen by hand, on a dark system"


def test_focus_is_always_seen(show, data):
    page = show(data)
    reached, seen = set(), set()
    for _ in range(120):
        page.keyboard.press("Tab")
        state = page.evaluate("""() => {
            const node = document.activeElement;
            const ring = node.matches('.choice input') ? node.nextElementSibling : node;
            const section = node.closest('section');
            return [node.id || node.textContent.slice(0, 30) || node.outerHTML.slice(0, 60), section && section.id,
                getComputedStyle(ring).outlineStyle !== 'none'];
        }""")
        reached.add(state[1])
        seen.add(state[0])
        assert state[2] or state[0].startswith("<body") or page.evaluate("document.activeElement === document.body"), (
            state
        )
    assert reached >= {"loss", "params", "tied", "tokens", "lens", "neighbours", "geometry"}
    assert seen >= {"tied-log", "tokens-filter", "lens-colour", "lens-layer", "neighbour-search"}


# --- charts and tables


def test_loss_chart(show, data):
    page = show(data)
    val = data["loss"]["val"]
    chart = page.locator("#loss-chart svg")
    assert page.locator("#loss-chart circle.dot.s2").count() == len(val)
    step, loss = val[-1]
    last = f"{loss:.3f} nats, {loss * 1.4427:.3f} bits"
    assert chart.get_attribute("aria-label") == f"Loss over steps; last held-out loss {last} at step {step}"
    tip = page.locator("#loss-chart .tip")
    assert not tip.is_visible()
    chart.focus()
    assert tip.is_visible() and tip.locator("b").inner_text() == "step 120"
    assert last in tip.inner_text()
    for key, expected in [("ArrowLeft", 119), ("Home", 1), ("ArrowRight", 2), ("End", 120)]:
        page.keyboard.press(key)
        assert tip.locator("b").inner_text() == f"step {expected}"
    page.keyboard.press("Home")
    loss = data["loss"]["train"][0][1]
    assert f"{loss:.3f} nats, {loss * 1.4427:.3f} bits" in tip.inner_text()
    assert "held out" not in tip.inner_text(), "none was measured yet"
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    assert "held out (step 30)" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    assert 50 <= int(tip.locator("b").inner_text().split()[1]) <= 70
    axes = texts_of(page.locator("#loss-chart text.title"))
    assert axes == ["step", "nats per token", "bits per character"]


def test_params_table_and_totals(show, data):
    page = show(data)
    assert texts_of(page.locator("#params-totals dd")) == ["330", "1,320", "144 (43.6%)", "186"]
    rows = [texts_of(row.locator("td")) for row in page.locator("#params-table tbody tr").all()]
    assert rows[0] == [
        "embed/embedding",
        "24 \u00d7 6",
        "144",
        "576",
        "lookup, head",
        "3.250",
        "0.03125",
        "0.5000",
        "50.0%",
    ]
    page.locator("#params-table th button", has_text="parameters").click()
    assert texts_of(page.locator("#params-table td:first-child"))[0] == "block_0/ffn/up/kernel"
    page.locator("#params-table th button", has_text="path").click()
    assert texts_of(page.locator("#params-table td:first-child"))[0] == "block_0/ffn/up/kernel"
    page.locator("#params-table th button", has_text="path").click()
    assert texts_of(page.locator("#params-table td:first-child"))[0] == "norm/scale"


def test_tied_charts_follow_their_controls(show, data):
    page = show(data)
    record, share = data["tied"][-1], page.locator("#tied-share")
    share.locator("svg").focus()
    told = share.locator(".tip").inner_text().split("\n")
    assert told[0] == "step 120"
    for norm, name in (("l2", "L2"), ("l2_squared", "L2 squared"), ("l1", "L1")):
        assert told[told.index(name) + 1] == f"{record[f'head_share_{norm}']:.1%}"
        page.locator(f"#tied-norm input[value={norm}]").check()
        label = page.locator("#tied-norms svg").last.get_attribute("aria-label")
        assert label.startswith(f"{name} of the parts") and f"sum {record[f'sum_{norm}']:.4}"[:8] in label
    update = page.locator("#tied-update svg").get_attribute("aria-label")
    assert minus(f"sum {record['update_cosine_sum']:.3f}") in update
    ticks = {}
    for log in (True, False):
        page.locator("#tied-log").set_checked(log)
        ticks[log] = texts_of(share.locator("text"))
    assert "step (logarithmic)" in ticks[True] and "0" in ticks[True] and "100" in ticks[True]
    assert "step" in ticks[False]


def test_a_missing_value_breaks_the_line(show, data):
    data["tied"][3]["head_share_l2"] = None
    data["loss"]["train"][50][1] = math.nan
    page = show(data)
    path = page.locator("#tied-share path.line.s4").last.get_attribute("d")
    assert (path.count("M"), path.count("L")) == (2, len(data["tied"]) - 3)
    path = page.locator("#loss-chart path.line.faint").get_attribute("d")
    assert (path.count("M"), path.count("L")) == (2, len(data["loss"]["train"]) - 3)


def test_gradient_table(show, data):
    page = show(data)
    stats = data["gradient"]["stats"]
    row = texts_of(page.locator("#gradient-tables tbody tr").first.locator("td"))
    assert [float(x) for x in row[:3]] == pytest.approx([stats[f"{p}_l2"] for p in ("lookup", "head", "sum")], rel=1e-3)
    assert row[3] == f"{stats['head_share_l2']:.1%}"
    figures = texts_of(page.locator("#gradient-tables dd"))
    assert figures[0] == minus(f"{stats['cosine']:.3f}") and figures[2] == "17"
    assert "on 2,048 held-out tokens" in page.inner_text("#gradient p")


def token_column(page, index):
    return texts_of(page.locator(f"#tokens-table tbody td:nth-child({index})"))


def test_token_table_sorts_and_filters(show, data):
    page = show(data)
    head = page.locator("#tokens-table th", has_text="cosine")
    known = sorted((row["cosine"] for row in data["tokens"] if row["cosine"] is not None), reverse=True)
    for key, direction, cosines in (("Enter", "descending", known), ("Space", "ascending", known[::-1])):
        head.locator("button").focus()
        page.keyboard.press(key)
        assert head.get_attribute("aria-sort") == direction
        assert token_column(page, 7) == [*(minus(f"{x:.3f}") for x in cosines), DASH], "a missing value comes last"
    sorts = page.locator("#tokens-table th").evaluate_all("all => all.map((th) => th.getAttribute('aria-sort'))")
    assert sorts.count("none") == 8
    page.locator("#tokens-table th button", has_text="id").first.click()
    page.locator("#tokens-table th button", has_text="id").first.click()
    assert token_column(page, 2) == [str(row["id"]) for row in data["tokens"]]
    assert [text for text in token_column(page, 1) if "softmax only" in text] == ["ésoftmax only"]
    plain = [text.removesuffix("softmax only") for text in token_column(page, 1)]
    assert plain == [shown(row["id"]) for row in data["tokens"]]
    assert page.locator("#tokens-table .token", has_text="⏎").get_attribute("title") == '"\\n", #4'

    search = page.locator("#tokens-filter")
    for typed, ids in [("the", [12, 13, 14]), ("</SCRIPT>", [0]), ("⏎", [4]), ("\t", [17]), ("#12", [12]), ("zzz", [])]:
        search.fill(typed)
        assert token_column(page, 2) == [str(i) for i in ids], typed
    assert "No row fits." in page.inner_text("#tokens-table")


def test_long_token_tables_show_their_first_rows(show, data):
    row = data["tokens"][0]
    data["tokens"] = [{**row, "id": 100 + i, "head_l2": 1.0 + i} for i in range(1000)]
    page = show(data)
    assert page.locator("#tokens-table tbody tr").count() == 200
    assert "The first 200 of 1,000 rows." in page.inner_text("#tokens-table")
    page.locator("#tokens-table .more button").click()
    assert page.locator("#tokens-table tbody tr").count() == 1000
    assert token_column(page, 2)[0] == "1,099"


def test_token_scatter_names_the_token(show, data):
    page = show(data)
    page.locator("#tokens-chart svg").focus()
    page.keyboard.press("Home")
    tip = page.locator("#tokens-chart .tip").inner_text()
    assert "é" in tip and "#7" in tip and f"{data['tokens'][7]['row_norm']:.4g}"[:5] in tip, (
        "the one never seen is first"
    )
    moves = page.locator("#tokens-chart path.points").evaluate_all(
        "all => all.map((path) => path.getAttribute('d').split('M').length - 1)"
    )
    assert sorted(moves) == [1, len(data["tokens"]) - 1]


# --- the lens


def cell(page, r, t):
    return page.locator(f"#lens-grid td[data-layer='{r}'][data-position='{t}']")


def check_panel(page, lens, r, t):
    target = lens["targets"][t]
    rank = lens["rank_target"][r][t]
    panel = page.locator("#lens-panel")
    assert panel.locator("h3").inner_text() == f"{lens['points'][r]}, position {t}"
    assert texts_of(panel.locator("dd")) == [
        shown(lens["ids"][t]),
        "none follows" if target is None else shown(target),
        f"{lens['entropy'][r][t]:.3f} bits",
        f"{lens['kl'][r][t]:.3f} bits",
        DASH if rank is None else str(rank),
        str(lens["rank_input"][r][t]),
    ]
    assert texts_of(panel.locator(".bars .token")) == [shown(i) for i in lens["top_ids"][r][t]]
    assert texts_of(panel.locator(".bars .figure")) == [f"{p:.3f}" for p in lens["top_probs"][r][t]]
    widths = panel.locator(".bars .bar span").evaluate_all("all => all.map((bar) => parseFloat(bar.style.width))")
    assert widths == pytest.approx([100 * p for p in lens["top_probs"][r][t]], rel=1e-3, abs=1e-3)
    tagged = [i == target for i in lens["top_ids"][r][t]]
    assert [row.locator(".tag").count() == 1 for row in panel.locator(".bars li").all()] == tagged


def test_lens_grid_shows_the_first_choices(show, data):
    page = show(data)
    lens = data["lens"]
    for r in range(R):
        cells = texts_of(page.locator(f"#lens-grid tr[data-layer='{r}'] td"))
        assert cells == [shown(lens["top_ids"][r][t][0]) for t in range(T)]
    assert page.locator("#lens-prompt").text_content() == lens["prompt"]
    assert texts_of(page.locator("#lens-grid tbody th")) == lens["points"]
    assert texts_of(page.locator("#lens-grid thead .token")) == [shown(i) for i in lens["ids"]]
    assert texts_of(page.locator("#lens-grid tfoot .token")) == [shown(i) for i in lens["targets"] if i is not None]
    right = [lens["top_ids"][r][t][0] == lens["targets"][t] for r in range(R) for t in range(T)]
    assert any(right), "the data has a cell that is right"
    marks = page.locator("#lens-grid td").evaluate_all("all => all.map((td) => td.classList.contains('right'))")
    assert marks == right
    right = [i for i in range(T) if right[(R - 1) * T + i]]
    outlined = page.locator("#lens-bars li:has(.upright.right)")
    assert outlined.evaluate_all("all => all.map((li) => Number(li.dataset.position))") == right


def test_lens_panel_by_mouse_and_keyboard(show, data):
    page = show(data)
    lens = data["lens"]
    for r, t in ((0, 0), (2, 4), (R - 1, T - 1)):
        cell(page, r, t).hover()
        check_panel(page, lens, r, t)
    by_mouse = page.inner_text("#lens-panel")
    page.locator("#lens-colour").focus()
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement.getAttribute('role')") != "gridcell":
        page.keyboard.press("Tab")
    check_panel(page, lens, R - 1, 0)
    page.keyboard.press("End")
    assert page.inner_text("#lens-panel") == by_mouse
    r, t = R - 1, T - 1
    for key, down, right in [("ArrowUp", -1, 0), ("ArrowLeft", 0, -1), ("ArrowUp", -1, 0), ("ArrowDown", 1, 0)]:
        page.keyboard.press(key)
        r, t = r + down, t + right
        check_panel(page, lens, r, t)
        assert page.evaluate("document.activeElement.className").split()[0] == "chosen"
    page.keyboard.press("Control+Home")
    check_panel(page, lens, 0, 0)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    check_panel(page, lens, 0, 0)
    assert page.locator("#lens-grid td[tabindex='0']").count() == 1, "one stop for Tab"
    assert page.locator("#lens-grid td.chosen").count() == 1


def test_lens_panel_stays_with_the_keyboard_when_the_grid_scrolls_under_the_mouse(show, data):
    page = show(data, width=400)
    cell(page, 2, 1).hover()
    cell(page, 2, 0).focus()
    page.keyboard.press("End")
    page.wait_for_function("document.getElementById('lens-scroll').scrollLeft > 0")
    page.wait_for_timeout(200)
    check_panel(page, data["lens"], 2, T - 1)


def test_lens_colour_is_the_quantity_chosen(show, data):
    page = show(data)
    lens = data["lens"]
    kinds = {
        "probability": (1, [[p[0] for p in row] for row in lens["top_probs"]]),
        "kl": (1, lens["kl"]),
        "entropy": (1, lens["entropy"]),
        "rank_target": (-1, lens["rank_target"]),
        "rank_input": (-1, lens["rank_input"]),
    }
    for kind, (sign, values) in kinds.items():
        page.locator("#lens-colour").select_option(kind)
        colours = [luminance(pair[1]) for pair in page.locator("#lens-grid td").evaluate_all(COLOURS)]
        known = [(v, c) for v, c in zip(itertools.chain(*values), colours, strict=True) if v is not None]
        ink = [-c for _, c in sorted(known, key=lambda pair: sign * pair[0])]
        assert all(a <= b + 1e-6 for a, b in itertools.pairwise(ink)), f"{kind}: more ink means more"
    page.locator("#lens-colour").select_option("kl")
    assert texts_of(page.locator("#lens-scale span"))[2] == f"{np.max(lens['kl']):.3g} bits"


def test_lens_slider_and_curves(show, data):
    page = show(data)
    lens = data["lens"]
    slider = page.locator("#lens-layer")
    assert slider.get_attribute("max") == str(R - 1)
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    for r in (1, 3):
        slider.fill(str(r))
        assert page.inner_text("#lens-layer-name") == slider.get_attribute("aria-valuetext") == lens["points"][r]
        assert texts_of(page.locator("#lens-bars .token")) == [shown(lens["top_ids"][r][t][0]) for t in range(T)]
        assert texts_of(page.locator("#lens-bars .figure")) == [f"{lens['top_probs'][r][t][0]:.2f}" for t in range(T)]
        heights = page.locator("#lens-bars .upright span").evaluate_all(
            "all => all.map((b) => parseFloat(b.style.height))"
        )
        assert heights == pytest.approx([100 * lens["top_probs"][r][t][0] for t in range(T)], rel=1e-3)
        assert texts_of(page.locator("#lens-grid tr.marked th")) == [lens["points"][r]]
        label = page.locator("#lens-curves svg").last.get_attribute("aria-label")
        means = [f"{np.mean(lens[key][r]):.3f}" for key in ("kl", "entropy")]
        assert (
            label
            == f"Means by layer; at {lens['points'][r]} mean KL to final {means[0]} bits, mean entropy {means[1]} bits"
        )
        mark = page.locator("#lens-curves line.mark").get_attribute("x1")
        dot = page.locator("#lens-curves circle.dot.s1").nth(r).get_attribute("cx")
        assert float(mark) == pytest.approx(float(dot), abs=0.1)


def test_lens_switch_to_the_tuned_one(show, data):
    page = show(data)
    page.locator("#lens-kind input[value=tuned]").check()
    cell(page, 1, 3).hover()
    check_panel(page, data["tuned"], 1, 3)
    page.locator("#lens-kind input[value=lens]").check()
    check_panel(page, data["lens"], 1, 3)


# --- neighbours and geometry


def check_chosen(page, data, id):
    table = data["neighbours"]
    row = table["of"].index(id)
    chosen = page.locator("#neighbour-chosen")
    assert texts_of(chosen.locator("h3 .token")) == [shown(id)]
    assert texts_of(chosen.locator("li .token")) == [shown(i) for i in table["ids"][row]]
    assert texts_of(chosen.locator(".figure")) == [minus(f"{c:.3f}") for c in table["cosines"][row]]


def test_neighbours(show, data):
    page = show(data)
    search, matches = page.locator("#neighbour-search"), page.locator("#neighbour-matches button")
    assert matches.count() == V - 1
    for typed, expected in [
        ("the", [12, 13, 14]),
        ("The", [13, 12, 14]),
        ("</script>", [0]),
        ("#12", [12]),
        ("#3", [20, 3]),
        ("⏎", [4]),
        ("😀", [8]),
    ]:
        search.fill(typed)
        assert texts_of(matches) == [shown(i) for i in expected], typed
        check_chosen(page, data, expected[0])
    matches.last.click()
    search.fill("the")
    matches.nth(1).click()
    check_chosen(page, data, 13)
    assert matches.nth(1).get_attribute("aria-pressed") == "true"
    near = data["neighbours"]["ids"][data["neighbours"]["of"].index(13)]
    place, other = next((i, v) for i, v in enumerate(near) if v != NO_TOKEN)
    page.locator("#neighbour-chosen li").nth(place).locator("button").click()
    check_chosen(page, data, other)
    assert page.evaluate("document.activeElement.parentNode.id") == "neighbour-chosen"
    search.fill("nothing like it")
    assert matches.count() == 0 and "No token fits “nothing like it”." in page.inner_text("#neighbour-count")
    search.fill(f"#{NO_TOKEN}")
    assert matches.count() == 0, "its row is not in the table"


def test_a_neighbour_without_a_row_of_its_own_is_no_button(show, data):
    data["neighbours"] = {"ids": [[NO_TOKEN, 13]], "cosines": [[0.5, 0.25]], "of": [12]}
    page = show(data)
    check_chosen(page, data, 12)
    assert page.locator("#neighbour-chosen button").count() == 0


def test_geometry(show, data):
    page = show(data)
    assert page.locator("#singular-chart circle").count() == 5, "zero has no place on a logarithmic axis"
    assert "first 2 of 6 directions. Zero, and so not drawn: 1." in page.inner_text("#singular-text")
    label = page.locator("#singular-chart svg").get_attribute("aria-label")
    assert label == "Singular values of E; the largest is 9.500, the smallest 0"
    result = page.inner_text("#consistency-result")
    assert "91.3%" in result
    assert texts_of(page.locator("#consistency-result .token")) == [shown(i) for i in (0, 1, 6, 7)]


def test_a_large_run_opens_quickly(show, data):
    rng = np.random.default_rng(0)
    V, T, R, k = 8000, 64, 25, 10
    data["texts"] = [f" w{v}" for v in range(V)]
    data["tokens"] = [{**data["tokens"][0], "id": v, "train_count": v} for v in range(2000)]
    data["tuned"] = None
    grid = rng.random((R, T)).tolist()
    data["lens"] = {
        **{"ids": rng.integers(0, V, T).tolist(), "targets": rng.integers(0, V, T).tolist()},
        "points": [f"block_{r}" for r in range(R)],
        "top_ids": rng.integers(0, V, (R, T, k)).tolist(),
        "top_probs": rng.random((R, T, k)).tolist(),
        **{"entropy": grid, "kl": grid, "rank_target": grid, "rank_input": grid},
    }
    near = rng.integers(0, V, (V, k)).tolist()
    data["neighbours"] = {"ids": near, "cosines": rng.random((V, k)).tolist(), "of": list(range(V))}
    page = show(data)
    timing = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    assert page.evaluate(timing) < 2000
    assert page.locator("#lens-grid td").count() == R * T
    assert page.locator("#neighbour-matches button").count() == 80
