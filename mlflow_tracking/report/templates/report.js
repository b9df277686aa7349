"use strict";
(() => {
  const form = document.getElementById("filters");
  const boxes = [...form.querySelectorAll("input[type=checkbox]")];
  const facetsOf = (element) => JSON.parse(element.dataset.facets);
  const tables = [...document.querySelectorAll("article.table")].map((article) => ({
    article,
    columns: [...article.querySelectorAll("th[data-column]")],
    columnFacets: [...article.querySelectorAll("th[data-column]")].map(facetsOf),
    groupRows: [...article.querySelectorAll("thead tr")].map((row) => [...row.querySelectorAll("th.group")]),
    lines: [...article.querySelectorAll("tbody tr")].map((row) => ({
      row,
      facets: facetsOf(row),
      cells: [...row.querySelectorAll("td")],
      heads: [...row.querySelectorAll("th.head")],
    })),
    topHeads: [...article.querySelectorAll("thead th.head")],
    scroll: article.querySelector(".scroll"),
  }));
  const figures = [...document.querySelectorAll("figure[data-facets]")].map((figure) => ({
    figure,
    facets: facetsOf(figure),
    parts: [...figure.querySelectorAll("[data-method]")],
  }));
  const text = (head) => head.querySelector("span").textContent;
  let place = "";

  const chosen = () => {
    const found = {};
    for (const box of boxes) {
      if (box.name !== "view" && box.checked) (found[box.name] ??= new Set()).add(box.value);
    }
    return found;
  };
  const passes = (facets, wanted) =>
    Object.entries(wanted).every(([facet, values]) => !(facet in facets) || values.has(facets[facet]));

  const apply = () => {
    const wanted = chosen();
    for (const table of tables) {
      const shown = table.columnFacets.map((facets) => passes(facets, wanted));
      table.columns.forEach((column, i) => { column.hidden = !shown[i]; });
      for (const row of table.groupRows) {
        let start = 0;
        for (const heading of row) {
          const span = Number(heading.dataset.span);
          const left = shown.slice(start, start + span).filter(Boolean).length;
          heading.hidden = left === 0;
          if (left) heading.colSpan = left;
          start += span;
        }
      }
      let above = null;
      for (const line of table.lines) {
        line.row.hidden = !passes(line.facets, wanted);
        line.cells.forEach((cell, i) => { cell.hidden = !shown[i]; });
        if (line.row.hidden) continue;
        let same = above !== null;
        line.heads.forEach((head, i) => {
          same = same && text(head) === text(above.heads[i]);
          head.classList.toggle("repeats", same);
        });
        line.row.classList.toggle("starts", above !== null && line.heads.length > 1 && !line.heads[0].classList.contains("repeats"));
        above = line;
      }
      const empty = above === null || !shown.some(Boolean);
      table.article.classList.toggle("passed-over", empty);
      table.scroll.hidden = empty;
      table.article.querySelector(".empty").hidden = !empty;
    }
    for (const { figure, facets, parts } of figures) {
      figure.hidden = !passes(facets, wanted);
      for (const part of parts) {
        part.style.display = passes({ method: part.dataset.method }, wanted) ? "" : "none";
      }
    }
    for (const section of document.querySelectorAll("section.figures")) {
      section.querySelector(".empty").hidden = [...section.querySelectorAll("figure")].some((f) => !f.hidden);
    }
    for (const box of boxes) {
      if (box.name === "view") document.body.classList.toggle(`without-${box.value}`, !box.checked);
    }
    const textOf = (box) => box.nextElementSibling.textContent;
    const words = Object.keys(wanted).map((facet) =>
      boxes.filter((box) => box.name === facet && box.checked).map(textOf).join(", "));
    document.getElementById("chosen").textContent = words.join(" · ");
    form.classList.toggle("active", words.length > 0);
  };

  // All headers of lines stay in view where they leave room for the figures, otherwise the one that names the line.
  const pin = () => {
    for (const table of tables) {
      table.scroll.classList.remove("narrow");
      const widths = table.topHeads.map((head) => head.offsetWidth);
      const total = widths.reduce((sum, width) => sum + width, 0);
      const fits = table.scroll.scrollWidth <= table.scroll.clientWidth;
      const all = total > 0 && (fits || total <= 0.45 * table.scroll.clientWidth);
      table.scroll.classList.toggle("narrow", !all);
      let left = 0;
      widths.forEach((width, i) => {
        for (const head of [table.topHeads[i], ...table.lines.map((line) => line.heads[i])]) {
          head.classList.toggle("pinned", all);
          head.style.left = all ? `${left}px` : "";
        }
        left += width;
      });
    }
  };

  // The address keeps the choice, so that a filtered page can be sent to somebody.
  const remember = () => {
    const address = new URLSearchParams();
    for (const [facet, values] of Object.entries(chosen())) {
      for (const value of values) address.append(facet, value);
    }
    const views = boxes.filter((box) => box.name === "view");
    if (views.some((box) => box.checked !== box.defaultChecked)) {
      address.set("view", views.filter((box) => box.checked).map((box) => box.value).join(" "));
    }
    if (place) address.set("at", place);
    try {
      history.replaceState(null, "", `#${address}`);
    } catch {
      // Pages inside of a sandboxed frame have no address of their own.
    }
  };
  const recall = () => {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) return;
    const address = new URLSearchParams(hash);
    const views = address.has("view") ? address.get("view").split(" ") : null;
    for (const box of boxes) {
      if (box.name === "view") box.checked = views ? views.includes(box.value) : box.defaultChecked;
      else box.checked = address.getAll(box.name).includes(box.value);
    }
    apply();
    place = address.get("at") ?? "";
    if (place) document.getElementById(place)?.scrollIntoView();
  };

  const changed = () => { apply(); pin(); remember(); };
  form.addEventListener("change", changed);
  form.addEventListener("reset", () => setTimeout(changed));
  window.addEventListener("resize", pin);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.querySelector("nav.contents").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    place = link.hash.slice(1);
    document.getElementById(place).scrollIntoView();
    remember();
  });
  window.addEventListener("hashchange", recall);
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details.listed")) details.open = true;
  });
  if (matchMedia("(max-width: 60rem)").matches) {
    for (const details of document.querySelectorAll("nav.contents details, .filters details")) details.open = false;
  }
  document.documentElement.classList.add("js");
  apply();
  recall();
  pin();
})();
