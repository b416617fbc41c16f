// A cursor over each chart that reads out the values at the step under the pointer.
const shown = (value) => (value === null ? "-" : Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 }));
for (const chart of document.querySelectorAll(".chart")) {
  const { x: [first, last], box: [WIDTH, LEFT, RIGHT, TOP, BASE], total, series } = JSON.parse(chart.querySelector("script").textContent);
  const svg = chart.querySelector("svg");
  const cursor = document.createElementNS(svg.namespaceURI, "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", TOP);
  cursor.setAttribute("y2", BASE);
  svg.append(cursor);
  const tip = chart.appendChild(document.createElement("div"));
  tip.className = "tip";
  const show = (visibility) => { cursor.style.visibility = tip.style.visibility = visibility; };
  const nearest = (points, step) =>
    points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * WIDTH;
    const share = Math.min(1, Math.max(0, (across - LEFT) / (WIDTH - LEFT - RIGHT)));
    const step = first + share * (last - first);
    cursor.setAttribute("x1", LEFT + share * (WIDTH - LEFT - RIGHT));
    cursor.setAttribute("x2", LEFT + share * (WIDTH - LEFT - RIGHT));
    tip.replaceChildren(`step ${Math.round(step)}`);
    for (const { name, colour, points } of series) {
      const row = tip.appendChild(document.createElement("div"));
      row.className = `key k${colour}`;
      row.textContent = `${name}  ${shown(nearest(points, step)[1])}`;
    }
    if (total) {
      const sum = series.reduce((so_far, { points }) => so_far + (nearest(points, step)[1] ?? 0), 0);
      tip.appendChild(document.createElement("div")).textContent = `in all  ${shown(sum)}`;
    }
    const onRight = share > 0.5;
    tip.style.left = onRight ? "70px" : "auto";
    tip.style.right = onRight ? "auto" : "24px";
    show("visible");
  });
  svg.addEventListener("pointerleave", () => show("hidden"));
}
