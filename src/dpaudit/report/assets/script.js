"use strict";
(() => {
  const tip = document.getElementById("tip");
  let shown = null;

  const hide = () => {
    tip.hidden = true;
    if (shown) shown.classList.remove("at");
    shown = null;
  };

  // beside the mark and inside the window
  const show = (mark, x, y) => {
    if (shown !== mark) {
      hide();
      shown = mark;
      mark.classList.add("at");
      tip.textContent = mark.dataset.tip;
      tip.hidden = false;
    }
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width < innerWidth ? x + 14 : x - 14 - box.width;
    const top = y - 14 - box.height > 0 ? y - 14 - box.height : y + 18;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  };

  const atMark = (mark) => {
    const box = mark.getBoundingClientRect();
    show(mark, box.x + box.width / 2, box.y + Math.min(box.height / 2, 60));
  };

  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  for (const plot of document.querySelectorAll("svg.plot")) {
    const marks = [...plot.querySelectorAll("[data-tip]")];
    plot.addEventListener("pointermove", (event) => {
      const mark = event.target.closest("[data-tip]");
      if (mark) show(mark, event.clientX, event.clientY);
      else hide();
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const last = marks.length - 1;
      const from = marks.indexOf(shown);
      let to = null;
      if (event.key in moves) to = from < 0 ? 0 : Math.max(0, Math.min(last, from + moves[event.key]));
      if (event.key === "Home") to = 0;
      if (event.key === "End") to = last;
      if (to === null || last < 0) return undefined;
      event.preventDefault();
      return atMark(marks[to]);
    });
  }
  addEventListener("scroll", hide, { passive: true });

  const button = document.getElementById("theme");
  const root = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : preferred.matches);
  const name = () => {
    button.textContent = dark() ? "Light theme" : "Dark theme";
    button.setAttribute("aria-pressed", String(dark()));
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  preferred.addEventListener("change", name);
  button.hidden = false;
  name();
})();
