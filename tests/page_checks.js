// What tests ask of an open page. Each function returns a list of faults, or of figures.

// Elements whose own text is shown; what is folded away or read aloud alone has no box.
function shownTexts() {
  return [...document.querySelectorAll("body *")].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && !one.closest("svg, script, style, #tip, .skip") &&
      [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
  });
}

function named(one) {
  return `${one.className} ${one.textContent.trim().slice(0, 40)}`;
}

// What reaches beyond the window, but for regions that scroll.
function overflowing() {
  const found = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
  for (const one of document.querySelectorAll("main *, header *")) {
    if (one.closest(".scroll, pre, svg, .timeline .x-axis")) continue;
    const box = one.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 0.5 || box.left < -0.5)) found.push(named(one));
  }
  return found;
}

// Texts that lie over each other.
function overlapping() {
  const boxes = shownTexts().filter((one) => !one.closest(".scroll")).map((one) => {
    const range = document.createRange();
    range.selectNodeContents(one);
    return [one, [...range.getClientRects()]];
  });
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  const found = [];
  boxes.forEach(([one, ours], index) => boxes.slice(index + 1).forEach(([other, theirs]) => {
    if (one.contains(other) || other.contains(one)) return;
    if (ours.some((a) => theirs.some((b) => meet(a, b)))) found.push(`${named(one)} | ${named(other)}`);
  }));
  return found;
}

const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
  .getContext("2d", { willReadFrequently: true });

function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}

// The ratio of WCAG 2: (L1 + 0.05) / (L2 + 0.05) of relative luminances.
function ratio(...colours) {
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const [high, low] = colours.map((colour) => {
    const [r, g, b] = rgba(colour).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }).sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

function behind(one) {
  for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (rgba(colour)[3] === 255) return colour;
  }
  return "white";
}

// Ratio, what AA asks for, and an example, for each kind of text.
function contrastOfTexts() {
  const seen = new Map();
  for (const one of shownTexts()) {
    const style = getComputedStyle(one), back = behind(one), key = style.color + back + style.fontSize + style.fontWeight;
    if (seen.has(key)) continue;
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    seen.set(key, [ratio(style.color, back), isLarge ? 3 : 4.5, named(one)]);
  }
  return [...seen.values()];
}

// Ratio to what lies behind, for each colour that a legend names; the scale of links tells by its order.
function contrastOfColours() {
  const surface = getComputedStyle(document.querySelector(".bar")).backgroundColor;
  return [...document.querySelectorAll(".legend i:not(.limit-key, [class^=l], .island)")]
    .map((one) => [ratio(getComputedStyle(one).backgroundColor, surface), one.parentElement.textContent]);
}

// What takes the focus, or is an image, and has no name.
function nameless() {
  return [...document.querySelectorAll("a, button, summary, [tabindex], [role=img]")]
    .filter((one) => !(one.getAttribute("aria-label") || one.textContent).trim()).map((one) => one.outerHTML);
}
