// Shows the pointer's step on every plot: a vertical line, and the legends' values at that step.
"use strict";
(() => {
  const plots = [...document.querySelectorAll(".plot")].map((box) => ({
    box,
    last: Number(box.dataset.last),
    curves: JSON.parse(box.dataset.curves),
    values: [...box.parentElement.querySelectorAll(".entry b")],
  }));
  const resting = plots.map((plot) => plot.values.map((value) => value.textContent));
  const cursors = plots.map((plot) => {
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    cursor.hidden = true;
    plot.box.append(cursor);
    return cursor;
  });
  const nearest = (steps, step) => {
    let low = 0;
    let high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
  };
  const show = (step) => plots.forEach((plot, number) => {
    cursors[number].hidden = false;
    cursors[number].style.left = `${(100 * step) / plot.last}%`;
    cursors[number].dataset.step = step.toLocaleString("en");
    plot.curves.forEach((curve, index) => {
      plot.values[index].textContent = curve.y[nearest(curve.x, step)];
    });
  });
  const rest = () => plots.forEach((plot, number) => {
    cursors[number].hidden = true;
    plot.values.forEach((value, index) => { value.textContent = resting[number][index]; });
  });
  plots.forEach((plot) => {
    plot.box.addEventListener("pointermove", (event) => {
      const place = plot.box.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - place.left) / place.width));
      show(Math.round(share * plot.last));
    });
    plot.box.addEventListener("pointerleave", rest);
  });
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
  });
})();
