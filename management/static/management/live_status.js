// Shows the live status of deployments and workers on the admin's lists; updated once a second.
(() => {
  const text = document.getElementById("live-status-text");
  const table = document.getElementById("live-workers");
  const body = table.querySelector("tbody");

  function show(status) {
    text.textContent = status.deployments
      .map((d) => `${d.deployment}: ${d.state}${d.reason ? ` (${d.reason})` : ""}`)
      .join(" · ") || "No deployments.";
    table.hidden = status.workers.length === 0;
    body.replaceChildren(...status.workers.map((w) => {
      const row = document.createElement("tr");
      const usage = w.kv_usage_percent === null ? "" : `${w.kv_usage_percent} %`;
      for (const value of [w.worker, w.epoch, w.role, w.state, w.running, w.waiting, usage, w.generated_tokens]) {
        row.insertCell().textContent = value ?? "";
      }
      return row;
    }));
  }

  function connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/ws/status`);
    socket.onmessage = (event) => show(JSON.parse(event.data));
    socket.onclose = () => {
      text.textContent = "Live status disconnected; reconnecting…";
      setTimeout(connect, 2000);
    };
  }

  connect();
})();
