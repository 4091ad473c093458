// Zooms the timeline above, writes names onto calls that are wide enough, and says what the pointer is on.
(() => {
  const box = document.currentScript.previousElementSibling, track = box.querySelector(".track");
  const picture = track.querySelector("svg"), axis = picture.querySelector(".axis"), whole = Number(box.dataset.us);
  const names = [...picture.querySelectorAll("text")].map(text => ({ text, width: parseFloat(text.parentNode.getAttribute("width")) }));
  const pointed = box.querySelector(".pointed"), hint = pointed.textContent;
  let scale = 1;
  const time = us => us >= 1e6 ? `${us / 1e6} s` : us >= 1e3 ? `${us / 1e3} ms` : `${Math.round(us * 1e3) / 1e3} µs`;
  function draw() {
    picture.style.width = `${100 * scale}%`;
    const wide = picture.clientWidth;
    if (!wide) return;
    for (const { text, width } of names) {
      text.style.display = width * wide / 100 > 7 * text.textContent.length + 10 ? "inline" : "none";
    }
    const rough = whole * 90 / wide, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(one => one * power >= rough);
    axis.replaceChildren();
    for (let mark = 0; mark * step < whole * (1 - 60 / wide); mark++) {
      const label = document.createElementNS(picture.namespaceURI, "text");
      label.setAttribute("x", `${100 * mark * step / whole}%`);
      label.setAttribute("y", picture.clientHeight - 6);
      label.textContent = time(mark ? Number((mark * step).toPrecision(6)) : 0);
      axis.append(label);
    }
  }
  function zoom(by, at) {
    const before = scale, left = track.scrollLeft;
    scale = by ? Math.min(400, Math.max(1, scale * by)) : 1;
    draw();
    track.scrollLeft = (left + at) * scale / before - at;
  }
  for (const button of box.querySelectorAll("button")) {
    button.addEventListener("click", () => zoom(Number(button.dataset.by), track.clientWidth / 2));
  }
  track.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) < 0 ? 1.25 : 0.8, event.clientX - track.getBoundingClientRect().left);
  }, { passive: false });
  track.addEventListener("pointermove", event => {
    if (event.buttons && event.pointerType === "mouse") track.scrollLeft -= event.movementX;
    const call = event.target.closest(".call");
    pointed.textContent = call ? call.querySelector("title").textContent : hint;
  });
  track.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") event.preventDefault(); });
  new ResizeObserver(draw).observe(track);
})();
