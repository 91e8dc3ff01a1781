"use strict";
const SVG = "http://www.w3.org/2000/svg";
const CLASSES = { F: "forward", B: "backward", I: "input", W: "weight" };
const NAMES = { F: "forward", B: "backward", I: "gradient of the input", W: "gradient of the weights" };
const ROW = 10; // Height of a rank in the drawing's own units.

function read(id) {
  const found = document.getElementById(id);
  return found ? JSON.parse(found.textContent) : null;
}

function seconds(value) {
  const units = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
  const [name, size] = units.find(([, least]) => value >= least) || units[2];
  return `${(value / size).toPrecision(3)} ${name}`;
}

/* What an element says is shown beside it, under the pointer and under the keyboard alike. */
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

/* A matrix: the link under the pointer or the arrow keys is told below it. */
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
  svg.addEventListener("mousemove", (event) => {
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

/* One step: every pass a rectangle, those of a kind one path. */
class Timeline {
  constructor(figure, data, longest, resolution) {
    Object.assign(this, { figure, data, resolution, unit: longest / resolution, from: 0, to: resolution, rank: 0, place: -1 });
    this.track = figure.querySelector(".track");
    this.axis = figure.querySelector(".x-axis");
    this.told = figure.querySelector("output");
    this.svg = this.track.appendChild(document.createElementNS(SVG, "svg"));
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.style.height = `${Math.max(60, Math.min(480, data.ranks.length * 22))}px`;
    this.draw();
    this.cursor = this.svg.appendChild(document.createElementNS(SVG, "rect"));
    this.cursor.setAttribute("class", "cursor");
    this.look(0, resolution);
    for (const button of figure.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => this.zoom(button.dataset.zoom));
    this.track.addEventListener("keydown", (event) => this.key(event));
    this.track.addEventListener("mousemove", (event) => this.point(event));
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
    const most = Math.max(2, Math.min(6, Math.floor(this.track.clientWidth / 90)));
    this.axis.replaceChildren(...Array.from({ length: most - 1 }, (_, index) => {
      const tick = document.createElement("span"), share = (index + 1) / most;
      tick.style.left = `${100 * share}%`;
      tick.textContent = seconds((this.from + share * width) * this.unit);
      return tick;
    }));
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
const matrices = read("links-data"), timelines = read("timeline-data");
document.querySelectorAll(".matrix").forEach((figure) => matrix(figure, matrices[figure.dataset.matrix]));
document.querySelectorAll(".timeline").forEach((figure) => {
  const step = timelines.steps[figure.dataset.step];
  const drawn = new Timeline(figure, step.data, timelines.longest_s, timelines.resolution);
  addEventListener("resize", () => drawn.look(drawn.from, drawn.to));
});
