"use strict";
const SVG = "http://www.w3.org/2000/svg";
const CLASSES = { F: "forward", B: "backward", I: "input", W: "weight" };
const NAMES = { F: "forward", B: "backward", I: "gradient of the input", W: "gradient of the weights" };
const ROW = 10; // Height of a rank's row in units of the drawing.

function read(id) {
  const found = document.getElementById(id);
  return found ? JSON.parse(found.textContent) : null;
}

const UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];

function seconds(value) {
  const [name, size] = UNITS.find(([, least]) => value >= least) || UNITS[2];
  return value === 0 ? "0 s" : `${(value / size).toPrecision(value >= 100 * size ? 4 : 3)} ${name}`;
}

/* Round times inside a range, at most `most` of them, in one unit and with enough digits to differ. */
function ticks(from, to, most) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const [name, size] = UNITS.find(([, least]) => to >= least) || UNITS[2];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  const first = Math.ceil(from / step - 1e-9), last = Math.floor(to / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step)
    .map((time) => [time, `${(time / size).toFixed(digits)} ${name}`]);
}

/* Shows an element's text beside the element, under the pointer or under the keyboard's focus. */
function tips() {
  const tip = document.getElementById("tip");
  const show = (event) => {
    const from = event.target.closest("[data-tip]");
    tip.hidden = !from;
    if (!from) return;
    tip.textContent = from.dataset.tip;
    const box = from.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - tip.offsetWidth - 8);
    const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
  };
  for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, show);
  document.addEventListener("focusout", () => { tip.hidden = true; });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
}

/* A click on a point of the plot shows the flags of its configuration below the plot, and copies them. */
function picks() {
  const picked = document.getElementById("picked");
  if (!picked) return;
  const [told, flags] = picked.children;
  document.getElementById("points").addEventListener("click", async ({ target }) => {
    if (!target.dataset.flags) return;
    picked.hidden = false;
    flags.textContent = target.dataset.flags;
    const name = target.dataset.tip.replace("\n", ", ");
    let how = "copied";
    try {
      await navigator.clipboard.writeText(target.dataset.flags);
    } catch {
      getSelection().selectAllChildren(flags);
      how = "selected: copy them";
    }
    told.textContent = `${name}. Flags to append, ${how}:`;
  });
}

/* A matrix of links: a text below the matrix describes the link under the pointer or the arrow keys. */
function matrix(figure, data) {
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor"), told = figure.querySelector("output");
  let at = [0, Math.min(1, data.size - 1)];
  const move = (row, column) => {
    at = [Math.max(0, Math.min(data.size - 1, row)), Math.max(0, Math.min(data.size - 1, column))];
    cursor.setAttribute("x", at[1]);
    cursor.setAttribute("y", at[0]);
    const rate = data.rates[at[0]][at[1]];
    told.textContent = `${data.names[at[0]]} to ${data.names[at[1]]}: ${rate === null ? "no link" : `${(rate / 1e9).toPrecision(3)} GB/s`}`;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    move(Math.floor((event.clientY - box.top) / box.height * data.size), Math.floor((event.clientX - box.left) / box.width * data.size));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    move(at[0] + step[0], at[1] + step[1]);
  });
}

function label(words, side, share) {
  const made = document.createElement("span");
  made.style[side] = `${100 * share}%`;
  made.textContent = words;
  return made;
}

/* The timeline of a step: every pass is a rectangle, and all passes of a kind are one SVG path. */
class Timeline {
  constructor(figure, data, longest, resolution) {
    Object.assign(this, { figure, data, resolution, unit: longest / resolution, from: 0, to: resolution, rank: 0, place: -1 });
    this.track = figure.querySelector(".track");
    this.axis = figure.querySelector(".x-axis");
    this.told = figure.querySelector("output");
    this.svg = this.track.appendChild(document.createElementNS(SVG, "svg"));
    this.svg.setAttribute("preserveAspectRatio", "none");
    const rows = data.ranks.length, height = Math.max(44, Math.min(480, rows * 22)), every = Math.ceil(rows * 14 / height);
    this.svg.style.height = `${height}px`;
    data.ranks.forEach(({ rank }, row) => {
      if (row % every === 0) figure.querySelector(".ranks").append(label(rank, "top", (row + 0.5) / rows));
    });
    this.draw();
    this.cursor = this.svg.appendChild(document.createElementNS(SVG, "rect"));
    this.cursor.setAttribute("class", "cursor");
    this.look(0, resolution);
    for (const button of figure.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => this.zoom(button.dataset.zoom));
    this.track.addEventListener("keydown", (event) => this.key(event));
    this.track.addEventListener("pointerdown", (event) => {
      this.grabbed = this.timeAt(event);
      this.track.setPointerCapture(event.pointerId);
    });
    this.track.addEventListener("pointerup", () => { this.grabbed = null; });
    this.track.addEventListener("pointermove", (event) => (this.grabbed == null ? this.point(event) : this.drag(event)));
    this.track.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? "in" : "out", this.timeAt(event));
    }, { passive: false });
  }

  draw() {
    const paths = {};
    const add = (name, x, y, width) => { (paths[name] ||= []).push(`M${x} ${y + 1}h${width}v${ROW - 2}h${-width}z`); };
    this.data.ranks.forEach((rank, row) => {
      rank.starts.forEach((start, index) => {
        const kind = rank.kinds[index], exposed = this.exposed(rank, index);
        add(CLASSES[kind], start, row * ROW, rank.lengths[index]);
        if (exposed) add("exposed", start + rank.lengths[index] - exposed, row * ROW, exposed);
      });
    });
    let start = this.data.makespan;
    for (const [, length] of this.data.after) {
      this.data.ranks.forEach((_, row) => add("after", start, row * ROW, Math.max(0, length - 1)));
      start += length;
    }
    for (const name of ["forward", "backward", "input", "weight", "exposed", "after"]) {
      if (!paths[name]) continue;
      const path = this.svg.appendChild(document.createElementNS(SVG, "path"));
      path.setAttribute("class", name);
      path.setAttribute("d", paths[name].join(""));
    }
  }

  exposed(rank, index) {
    if (rank.kinds[index] === "W") return 0;
    return Math.min(this.data.exposed[rank.stages[index]][rank.kinds[index] === "F" ? 0 : 1], rank.lengths[index]);
  }

  look(from, to) {
    const width = Math.max(20, Math.min(this.resolution, to - from));
    this.from = Math.max(0, Math.min(this.resolution - width, from));
    this.to = this.from + width;
    this.svg.setAttribute("viewBox", `${this.from} 0 ${width} ${this.data.ranks.length * ROW}`);
    const most = Math.max(2, Math.min(8, Math.floor(this.track.clientWidth / 90)));
    const places = ticks(this.from * this.unit, this.to * this.unit, most).map(([time, words]) => [(time / this.unit - this.from) / width, words]);
    this.axis.replaceChildren(...places.filter(([share]) => share > 0.04 && share < 0.96).map(([share, words]) => label(words, "left", share)));
  }

  zoom(how, around = (this.from + this.to) / 2) {
    if (how === "all") return this.look(0, this.resolution);
    const factor = how === "in" ? 0.5 : 2, share = (around - this.from) / (this.to - this.from);
    const width = (this.to - this.from) * factor;
    return this.look(around - share * width, around + (1 - share) * width);
  }

  timeAt(event) {
    const box = this.svg.getBoundingClientRect();
    return this.from + (event.clientX - box.left) / box.width * (this.to - this.from);
  }

  drag(event) {
    const by = this.grabbed - this.timeAt(event);
    this.look(this.from + by, this.to + by);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect(), time = this.timeAt(event);
    const row = Math.floor((event.clientY - box.top) / box.height * this.data.ranks.length);
    const rank = this.data.ranks[row];
    if (!rank) return;
    const place = rank.starts.findLastIndex((start) => start <= time);
    if (place >= 0 && time <= rank.starts[place] + rank.lengths[place]) this.select(row, place);
    else this.told.textContent = `pipeline rank ${rank.rank} at ${seconds(time * this.unit)}: ${this.between(time)}`;
  }

  between(time) {
    let end = this.data.makespan;
    if (time < end) return "waits";
    for (const [name, length] of this.data.after) if (time < (end += length)) return name;
    return "the step has ended";
  }

  select(row, place) {
    const rank = this.data.ranks[row], start = rank.starts[place], length = rank.lengths[place];
    [this.rank, this.place] = [row, place];
    for (const [name, value] of Object.entries({ x: start, y: row * ROW + 1, width: length, height: ROW - 2 })) this.cursor.setAttribute(name, value);
    const exposed = this.exposed(rank, place);
    const also = exposed ? `, ${seconds(exposed * this.unit)} of it communication that nothing hides` : "";
    const rest = rank.left_out && place === rank.starts.length - 1 ? `; ${rank.left_out} later passes are not drawn` : "";
    this.told.textContent = `pipeline rank ${rank.rank}: ${NAMES[rank.kinds[place]]} of micro-batch ${rank.microbatches[place]} on stage ${rank.stages[place]}, ` +
      `${seconds(start * this.unit)} to ${seconds((start + length) * this.unit)} (${seconds(length * this.unit)})${also}${rest}`;
  }

  key(event) {
    const zooms = { "+": "in", "=": "in", "-": "out", "0": "all" };
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in zooms) && !(event.key in steps)) return;
    event.preventDefault();
    if (event.key in zooms) {
      const rank = this.data.ranks[this.rank];
      this.zoom(zooms[event.key], this.place < 0 ? undefined : rank.starts[this.place]);
      return;
    }
    const [down, right] = steps[event.key];
    const row = Math.max(0, Math.min(this.data.ranks.length - 1, this.rank + down));
    const time = this.place < 0 ? 0 : this.data.ranks[this.rank].starts[this.place];
    const starts = this.data.ranks[row].starts;
    const near = down ? Math.max(0, starts.findLastIndex((start) => start <= time)) : this.place + right;
    this.select(row, Math.max(0, Math.min(starts.length - 1, near)));
    const start = this.data.ranks[row].starts[this.place];
    if (start < this.from || start > this.to) this.look(start - (this.to - this.from) / 2, start + (this.to - this.from) / 2);
  }
}

tips();
picks();
const matrices = read("links-data"), timelines = read("timeline-data");
document.querySelectorAll(".matrix").forEach((figure) => matrix(figure, matrices[figure.dataset.matrix]));
document.querySelectorAll(".timeline").forEach((figure) => {
  const drawn = new Timeline(figure, timelines.steps[figure.dataset.step], timelines.longest_s, timelines.resolution);
  addEventListener("resize", () => drawn.look(drawn.from, drawn.to));
});
