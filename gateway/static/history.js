// The conversations that this browser keeps: the newest first, and no more than have room. Tokens of access are not kept.

const KEY = "specd-conversations";
const MOST = 50;
const MOST_CHARACTERS = 2_000_000; // browsers give a page about 5 million

// Returns the conversations, without those that another version has written in another form.
export function conversations() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter(isConversation) : [];
  } catch {
    return [];
  }
}

export function keep(conversation) {
  write([conversation, ...conversations().filter(({ id }) => id !== conversation.id)]);
}

export function forget(id) {
  write(conversations().filter((each) => each.id !== id));
}

export function forgetAll() {
  try {
    localStorage.removeItem(KEY);
  } catch { /* a browser that keeps nothing has nothing to forget */ }
}

// Drops the oldest conversations until the others have room.
function write(kept) {
  const written = kept.slice(0, MOST).map((each) => JSON.stringify(each));
  while (written.length && written.reduce((sum, each) => sum + each.length, 0) > MOST_CHARACTERS) written.pop();
  for (;;) {
    try {
      localStorage.setItem(KEY, `[${written.join()}]`);
      return;
    } catch {
      if (!written.length) return; // the browser keeps nothing
      written.pop();
    }
  }
}

function isConversation(each) {
  return typeof each?.id === "string" && typeof each.system === "string" && Array.isArray(each.turns) && each.turns.every(isTurn);
}

function isTurn(turn) {
  const isText = ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string";
  return isText && (turn.role === "user" || (Array.isArray(turn.tokens) && turn.tokens.every(isToken)));
}

const isToken = (token) => typeof token?.text === "string" && typeof token.source === "string";
