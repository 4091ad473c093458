// Perfetto answers PING with PONG once it can take a trace; the trace then goes from window to window.
(() => {
  const place = "https://ui.perfetto.dev", box = document.currentScript.previousElementSibling;
  const name = box.dataset.file, status = box.querySelector(".status");
  const say = text => { status.textContent = text; };
  function open(read) {
    const viewer = window.open(place);
    if (!viewer) return say("The browser blocked the new window: allow it for this page and try again.");
    say("Waiting for Perfetto …");
    const buffer = read(), ping = setInterval(() => viewer.postMessage("PING", place), 100);
    const late = setTimeout(() => say(`Perfetto does not answer. Open ${place} and drop ${name} there.`), 15000);
    window.addEventListener("message", async function answer(event) {
      if (event.source !== viewer || event.origin !== place || event.data !== "PONG") return;
      window.removeEventListener("message", answer);
      clearInterval(ping);
      clearTimeout(late);
      viewer.postMessage({ perfetto: { buffer: await buffer, title: name, fileName: name } }, place);
      say(`Sent. If Perfetto shows nothing, drop ${name} there.`);
    });
  }
  const button = box.querySelector("button"), picker = box.querySelector("input");
  if (button) button.addEventListener("click", () => open(async () => {
    const text = atob(box.querySelector("script").textContent.trim());
    return Uint8Array.from(text, character => character.charCodeAt(0)).buffer;
  }));
  if (picker) picker.addEventListener("change", () => picker.files.length && open(() => picker.files[0].arrayBuffer()));
})();
