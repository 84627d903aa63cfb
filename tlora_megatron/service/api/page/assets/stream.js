// Follows the service's events with a token, and begins anew when the connection is lost.

const TOKEN = "tlora-token";
const PATIENCE_MS = [1000, 2000, 4000, 8000, 15000];

// The token comes in the address's fragment, which no server and no log sees, and leaves it at once.
function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found) {
    sessionStorage.setItem(TOKEN, found);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem(TOKEN);
}

const state = { skew: 0, mine: false };

const now = () => Date.now() / 1e3 + state.skew;

async function sentence(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the service answered ${answer.status}`;
  }
}

const ask = (path, signal) =>
  fetch(path, { headers: { Authorization: `Bearer ${takeToken()}` }, cache: "no-store", signal });

async function get(path) {
  const answer = await ask(path);
  if (!answer.ok) throw new Error(await sentence(answer));
  return answer.json();
}

// Calls `on[name](body)` for each event, `lost(why, isRefusal)` when it ends.
class Stream {
  constructor(on, lost, live) {
    Object.assign(this, { on, lost, live, failures: 0, stop: new AbortController() });
  }

  async follow() {
    const { signal } = this.stop;
    while (!signal.aborted) {
      try {
        const answer = await ask(`/v1/stream${state.mine ? "?mine=true" : ""}`, signal);
        if (answer.status === 401 || answer.status === 403) {
          this.lost(await sentence(answer), true);
          return;
        }
        if (!answer.ok) throw new Error(await sentence(answer));
        await this.read(answer);
        throw new Error("the service ended the connection");
      } catch (error) {
        if (signal.aborted) return;
        this.lost(error instanceof TypeError ? "the service does not answer" : error.message, false);
      }
      const wait = PATIENCE_MS[Math.min(this.failures++, PATIENCE_MS.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  async read(answer) {
    const at = Date.parse(answer.headers.get("date") || "");
    // The header has whole seconds: a smaller difference is none.
    if (Math.abs(at - Date.now()) > 2000) state.skew = (at - Date.now()) / 1e3;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        this.take(text.slice(0, end));
        text = text.slice(end + 2);
      }
    }
  }

  take(block) {
    this.failures = 0;
    this.live();
    let name = "";
    let data = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (name && this.on[name]) this.on[name](JSON.parse(data));
  }
}
