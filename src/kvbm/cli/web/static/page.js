"use strict";
// Asks for the manager's state every two seconds while the page can be seen, and draws it. What it shows is what
// `kvbm top` and `kvbm why` show.

const POLL_MS = 2000;
const ANSWER_MS = 8000;
const CURVE_S = 180; // what a curve shows
const GAP_S = 10; // nothing is drawn over a longer time without a look
const STORED = "kvbm.token";
const ROWS = 8;
const MEANINGS = JSON.parse(document.getElementById("meanings").textContent);

const at = (id) => document.getElementById(id);
let sinceStart = false;
let paused = false;
let lastSeen = null; // when the manager answered last
let epoch = null; // of the manager's life that is shown
let curves = {}; // by flow: [the manager's time in seconds, bytes per second], the oldest first
let polling = false;
let locked = false; // the token is missing or wrong: nothing is asked until there is another one
let token = takeToken();

// Only text ever comes from the manager: nothing is parsed as HTML.
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// The token is kept for this tab alone. It may come with the address; there it is removed at once.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token") || new URLSearchParams(location.search).get("token");
  if (given) {
    window.history.replaceState(null, "", location.pathname);
    sessionStorage.setItem(STORED, given);
  }
  return sessionStorage.getItem(STORED) || "";
}

const whole = (number) => Math.round(number).toLocaleString("en-US");
const percent = (share) => (share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`);
const rate = (perSecond) => (perSecond >= 10 || perSecond === 0 ? whole(perSecond) : perSecond.toFixed(1));

function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${size >= 100 || unit === 0 ? size.toFixed(0) : size.toFixed(1).replace(/\.0$/, "")} ${units[unit]}`;
}

function short(number) {
  if (number < 1e5) return whole(number);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= 0.9995 * size) return `${number < 99.95 * size ? (number / size).toFixed(1) : whole(number / size)}${unit}`;
  }
}

function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 90) return `${seconds < 10 && seconds > 0 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function table(headings, rows, words) {
  const head = make("tr", "", ...headings.map((text, i) => make("th", words.includes(i) ? "word" : "", text)));
  const lines = rows.map((cells) => make("tr", "", ...cells.map((cell, i) => {
    const td = cell instanceof Node ? make("td", "", cell) : make("td", "", String(cell));
    if (words.includes(i)) td.className = i === 0 ? "word cut id" : "word cut";
    td.title = td.textContent;
    return td;
  })));
  return make("table", "", make("thead", "", head), make("tbody", "", ...lines));
}

function bar(parts, extra) {
  return make("div", `bar ${extra || ""}`, ...parts.map(([share, name]) => {
    const part = make("i", name);
    part.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
    return part;
  }));
}

function fact(label, value) {
  return make("span", "", make("b", "", value), ` ${label}`);
}

function drawVerdict(view, trouble) {
  const lines = view.findings.map((finding) => make("p", finding.level, finding.text));
  at("verdict").replaceChildren(...(trouble ? [make("p", "fault", trouble)] : []), ...lines);
}

function drawNumbers(view) {
  const saved = view.saved_s > 0 ? duration(view.saved_s) : "–";
  const tiles = [
    [view.asked ? percent(view.hit_rate) : "–", "hit rate"],
    [saved, "prefill saved"],
    [short(view.loaded), `${view.unit} loaded`],
    [rate(view.lookups_per_s), "lookups/s"],
    [whole(view.lost_lookups), "lost prefixes"],
  ];
  at("numbers").replaceChildren(...tiles.map(([value, label]) => make("div", "number", make("b", "", value), make("span", "", label))));
}

function drawTiers(view) {
  if (!view.tiers.length) {
    at("tiers").replaceChildren(make("p", "empty", "No tier yet: the first engine makes them."));
    return;
  }
  at("tiers").replaceChildren(...view.tiers.map((tier) => {
    if (tier.capacity_blocks === 0) return drawStore(view, tier);
    const rest = Math.max(tier.used_share - tier.leased_share, 0);
    const name = make("span", "", make("b", "", tier.name), tier.staging ? " (staging)" : "", tier.up ? null : make("span", "off", " off"));
    const size = `${percent(tier.used_share)} of ${bytes(tier.capacity_bytes)}`;
    const style = tier.up ? "" : "off";
    return make("div", "tier",
      make("div", "top", name, make("span", "", size)),
      bar([[tier.leased_share, "leased"], [rest, ""]], style),
      make("div", "facts",
        tier.staging ? null : fact("of what is asked is found here", percent(tier.hit_share)),
        fact("leased", percent(tier.leased_share)),
        fact("evicted/s", rate(tier.evicted_per_s)),
        fact("blocks", whole(tier.resident_blocks + tier.filling_blocks)),
      ));
  }));
}

// A remote store: nobody knows how much fits there, so there is no bar.
function drawStore(view, tier) {
  const stores = view.spaces.flatMap((space) => space.remotes);
  const name = make("span", "", make("b", "", tier.name), tier.up ? null : make("span", "off", " off"));
  const sum = (number) => stores.reduce((total, each) => total + number(each), 0);
  const requests = sum((each) => Object.values(each.requests).reduce((total, count) => total + count, 0));
  const slowest = Math.max(...stores.map((each) => each.latency_s), 0);
  const opened = stores.filter((each) => each.reading !== "closed" || each.writing !== "closed");
  const places = [...new Set(stores.map((each) => each.place.replace(/\/[0-9a-f]{64}\/?$/, "") || each.name))].map((place) => make("small", "cut", place));
  return make("div", "tier",
    make("div", "top", name, make("span", "", `${bytes(tier.used_bytes)} known`)),
    ...places,
    ...opened.filter((each) => each.reading).map((each) => make("small", "off", `reads ${each.reading}, writes ${each.writing}`)),
    make("div", "facts",
      fact("of what is asked is found here", percent(tier.hit_share)),
      fact("blocks known", whole(tier.resident_blocks)),
      fact("requests", short(requests)),
      slowest > 0 ? fact("latency", `${(slowest * 1e3).toFixed(slowest < 1e-3 ? 2 : 1)} ms`) : null,
      stores.every((each) => each.complete) ? null : make("span", "", "still being read"),
    ));
}

function curve(points) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 100 34");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const most = Math.max(...points.map(([, value]) => value), 1);
  const last = points.length ? points[points.length - 1][0] : 0;
  const x = (s) => (100 - ((last - s) / CURVE_S) * 100).toFixed(2);
  const y = (value) => (32 - (value / most) * 28).toFixed(2);
  const shape = (tag, attributes) => {
    const element = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    svg.append(element);
  };
  shape("line", { x1: 0, x2: 100, y1: 33, y2: 33 });
  for (const part of withoutGaps(points).filter((each) => each.length > 1)) {
    const places = part.map(([s, value]) => `${x(s)},${y(value)}`).join(" ");
    shape("polygon", { points: `${x(part[0][0])},33 ${places} ${x(part[part.length - 1][0])},33` });
    shape("polyline", { points: places });
  }
  return svg;
}

// While the page was paused or hidden nobody looked: no line goes over that time.
function withoutGaps(points) {
  const parts = [];
  points.forEach((point, i) => {
    if (i === 0 || point[0] - points[i - 1][0] > GAP_S) parts.push([]);
    parts[parts.length - 1].push(point);
  });
  return parts;
}

function drawFlows(view) {
  at("flows").replaceChildren(...view.flows.map((flow) => {
    const name = `${flow.source} → ${flow.target}`;
    const points = curves[name] || [];
    const each = flow.mean_s === null ? "" : `${(flow.mean_s * 1e3).toFixed(1)} ms each`;
    return make("div", "flow",
      make("div", "top", make("span", "", name), make("b", "", `${(flow.bytes_per_s / 1e9).toFixed(3)} GB/s`)),
      curve(points),
      make("small", "", points.length > 1 ? `at most ${(Math.max(...points.map(([, value]) => value)) / 1e9).toFixed(3)} GB/s` : "", each ? ` · ${each}` : ""));
  }));
}

function remember(view) {
  for (const flow of view.flows) {
    const points = (curves[`${flow.source} → ${flow.target}`] ||= []);
    if (points.length && points[points.length - 1][0] >= view.uptime_s) continue; // the same look once more
    points.push([view.uptime_s, flow.bytes_per_s]);
    while (view.uptime_s - points[0][0] > CURVE_S) points.shift();
  }
}

function drawPrefixes(view) {
  if (!view.prefixes.length) {
    at("prefixes").replaceChildren(make("p", "empty", "No two requests have begun with the same block yet."));
    return;
  }
  const rows = view.prefixes.slice(0, ROWS).map((prefix) => [
    prefix.name, whole(prefix.tokens), whole(prefix.requests),
    prefix.asked_tokens ? percent(prefix.found_tokens / prefix.asked_tokens) : "–", whole(prefix.lost),
    ...view.tiers.map((tier) => (prefix.tokens ? percent((prefix.tiers[tier.name] || 0) / prefix.tokens) : "–")),
  ]);
  at("prefixes").replaceChildren(table(["prefix", "tokens", "requests", "found", "lost", ...view.tiers.map((tier) => tier.name)], rows, [0]));
}

function drawEngines(view) {
  if (!view.engines.length) {
    at("engines").replaceChildren(make("p", "empty", "No engine is connected."));
    return;
  }
  const rows = view.engines.slice(0, ROWS).map((engine) => {
    const ranks = `${engine.ranks.length}/${engine.rank_count}`;
    return [
      engine.engine, engine.model, engine.ranks.length < engine.rank_count ? make("span", "off", ranks) : ranks,
      engine.led ? whole(engine.leases) : make("span", "off", "no leader"), whole(engine.leased_blocks),
    ];
  });
  const more = view.engines.length - rows.length;
  at("engines").replaceChildren(table(["engine", "model", "ranks", "leases", "blocks"], rows, [0, 1]), ...(more > 0 ? [make("p", "empty", `and ${more} more`)] : []));
}

function drawQueues(view) {
  const items = [
    ["blocks up", view.queues.onboarding], ["blocks down", view.queues.offloading],
    ["leases", view.queues.leases], ["stores in flight", view.queues.reservations],
  ];
  if (hasStore(view)) items.splice(2, 0, ["up from the store", view.queues.remote_onboarding], ["down to the store", view.queues.remote_offloading]);
  at("queues").replaceChildren(...items.map(([label, value]) => make("div", "", make("dt", "", label), make("dd", "", whole(value)))));
}

const hasStore = (view) => view.tiers.some((tier) => tier.name === "remote");

function drawWhy(reply, view) {
  at("whyWindow").textContent = `of ${whole(reply.asked_blocks)} blocks asked in the last ${duration(reply.seconds)}`;
  if (!reply.requests.length) {
    at("why").replaceChildren(make("p", "empty", "No request was looked up yet."));
    return;
  }
  const reasons = Object.entries(reply.reasons).sort((one, other) => other[1] - one[1]).slice(0, 5);
  const bars = reasons.map(([reason, blocks]) => make("div", "reason",
    make("div", "top", make("b", "", reason.replaceAll("_", " ")), make("span", "", `${whole(blocks)} blocks`)),
    bar([[reply.asked_blocks ? blocks / reply.asked_blocks : 0, ""]]),
    make("small", "", MEANINGS[reason] || "")));
  if (!bars.length) bars.push(make("p", "empty", "Nothing was missing."));
  const store = hasStore(view);
  const rows = reply.requests.map((found) => {
    const reason = make("span", `tag ${{ hit: "hit", never_seen: "new" }[found.reason] || ""}`, found.reason.replaceAll("_", " "));
    reason.title = found.advice.length ? `would help: ${found.advice.join(" ")}` : MEANINGS[found.reason] || "";
    const computed = [...Object.values(found.missing), ...Object.values(found.unloaded)].reduce((sum, blocks) => sum + blocks, 0);
    const numbers = [found.blocks, found.host, found.disk, ...(store ? [found.remote] : []), found.loaded, computed].map(whole);
    return [found.request, reason, duration(found.seconds_ago), ...numbers];
  });
  const list = make("div", "wide", table(["request", "why", "ago", "blocks", "host", "disk", ...(store ? ["remote"] : []), "loaded", "computed"], rows, [0, 1]));
  at("why").replaceChildren(make("div", "", ...bars), list);
}

function drawHead(view) {
  at("manager").textContent = `manager ${view.pid} · ${view.version} · up ${duration(view.uptime_s)} · ${sinceStart ? "since its start" : `last ${duration(view.window_s)}`} · ${view.socket}`;
  at("manager").title = view.socket;
  document.title = view.findings.some((finding) => finding.level === "fault") ? "✗ KVBM" : view.asked ? `${percent(view.hit_rate)} KVBM` : "KVBM";
  at("foot").textContent = `Numbers over ${sinceStart ? "the time since the manager's start" : "the last minute"}, flows and evictions over the last ${duration(view.flows_window_s)}. The same in a terminal: kvbm top, kvbm why.`;
}

function setPill(kind, text) {
  at("pill").className = `pill ${kind}`;
  at("pill").textContent = text;
}

// Why there is no answer to show. `kind`: "token", or "refused" (somebody answered, with this status).
class NoAnswer extends Error {
  constructor(kind, text) {
    super(text);
    this.kind = kind;
  }
}

async function ask(path) {
  if (!/^[!-~]*$/.test(token)) throw new NoAnswer("token", ""); // no header could have it
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { headers, signal: AbortSignal.timeout(ANSWER_MS), cache: "no-store" });
  const document = await response.json().catch(() => ({}));
  if (response.status === 401) throw new NoAnswer("token", document.error || "");
  if (!response.ok) throw new NoAnswer("refused", `${response.status}: ${document.error || response.statusText}`);
  return document;
}

let shown = null;

async function look() {
  if (polling || locked) return;
  polling = true;
  try {
    const view = await ask(`/api/top?live=true&since_start=${sinceStart}`);
    const reply = await ask(`/api/why?limit=${ROWS}`);
    if (epoch !== view.epoch) curves = {};
    epoch = view.epoch;
    shown = view;
    lastSeen = new Date();
    remember(view);
    at("main").hidden = false;
    at("main").classList.remove("stale");
    drawHead(view);
    drawVerdict(view, "");
    drawNumbers(view);
    drawTiers(view);
    drawFlows(view);
    drawPrefixes(view);
    drawEngines(view);
    drawQueues(view);
    drawWhy(reply, view);
    at("notice").hidden = true;
    setPill("live", "live");
    drawPaused();
  } catch (error) {
    if (error.kind === "token") lock(); else lost(error);
  } finally {
    polling = false;
  }
}

function drawPaused() {
  if (!paused || locked) return;
  setPill("", "paused");
  at("notice").hidden = false;
  at("notice").textContent = lastSeen ? `Paused: the numbers are those of ${clock(lastSeen)}.` : "Paused before the first look.";
  at("main").hidden = false;
}

const clock = (date) => date.toLocaleTimeString("en-GB");

// The form is shown again; `token` was wrong, or there was none.
function lock() {
  locked = true;
  at("window").hidden = at("pause").hidden = true; // there is nothing to count or to pause
  at("wrong").hidden = !token;
  at("wrong").textContent = shown ? "The token has changed: this one is not accepted any more." : "This is not the token.";
  token = "";
  sessionStorage.removeItem(STORED);
  at("main").hidden = true;
  at("enter").hidden = false;
  setPill("gone", "token needed");
  document.title = "KVBM: token";
  at("token").focus();
}

function unlock(given) {
  token = given;
  sessionStorage.setItem(STORED, token);
  locked = false;
  at("window").hidden = at("pause").hidden = false;
  at("enter").hidden = true;
  setPill("wait", "looking…");
  look();
}

function lost(error) {
  const since = lastSeen ? ` since ${clock(lastSeen)}` : "";
  const answered = error.kind === "refused";
  const what = answered ? `The page's server answers, but has nothing of the manager${since}: ${error.message}`
    : `Nobody answers at this address${since}`;
  setPill("gone", answered && !error.message.startsWith("503") ? `no numbers${since}` : `manager does not answer${since}`);
  document.title = "✗ KVBM";
  at("main").hidden = false;
  at("main").classList.add("stale");
  at("notice").hidden = true;
  drawVerdict({ findings: [] }, `${what}. ${shown ? "Below is what it was when it was last seen; the" : "The"} page goes on looking for it.`);
  drawPaused();
}

async function watch() {
  for (;;) {
    if (!paused && document.visibilityState === "visible") await look();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

at("window").addEventListener("click", () => {
  sinceStart = !sinceStart;
  at("window").setAttribute("aria-pressed", String(sinceStart));
  look();
});
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  if (paused) drawPaused(); else look();
});
at("form").addEventListener("submit", (event) => {
  event.preventDefault(); // the browser keeps what a form sends in its history
  unlock(at("token").value.trim());
  at("token").value = "";
});
window.addEventListener("hashchange", () => { if (location.hash) unlock(takeToken()); });
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible" && !paused) look(); });
watch();
