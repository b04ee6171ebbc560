"use strict";
// Keeps the curves and completions of a page on the board up to date; what the user has chosen stays.

const RENEWAL_MS = 5000;
let seen = "";

async function renew() {
  const answer = await fetch(`${location.pathname.replace(/page$/, "data")}${location.search}&seen=${seen}`);
  if (answer.status !== 200) return;
  seen = answer.headers.get("etag");
  const fresh = await answer.json();
  const names = (of) => JSON.stringify([of.charts, of.further, of.runs.map((run) => run.completions.steps.length > 0)]);
  if (names(fresh) !== names(data)) {
    location.reload(); // a metric that was not there before
    return;
  }
  data = fresh;
  drawAll();
  renewCompletions();
}

setInterval(() => renew().catch(() => {}), RENEWAL_MS);
