// The fields of a request, and the tokens in a chunk of its answer.

const ALTERNATIVES = 4;

const byId = (id) => document.getElementById(id);
const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));

export const CHAT = "/v1/chat/completions";
export const pathOf = (body) => (body.messages ? CHAT : "/v1/completions");

// Returns the body of a request with this prompt or these messages, as the form has its parameters.
export function bodyOf(model, asked) {
  return {
    model: model.id,
    ...asked,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    top_k: number("top-k"),
    min_p: number("min-p"),
    repetition_penalty: number("repetition-penalty"),
    presence_penalty: number("presence-penalty"),
    frequency_penalty: number("frequency-penalty"),
    stop: byId("stop-string").value || undefined,
    seed: number("seed"),
    draft_source: byId("draft-source").value,
    num_draft_tokens: number("k"),
  };
}

// Returns the body with the fields that the page needs.
export function streamed(body) {
  const ofChat = { logprobs: true, top_logprobs: ALTERNATIVES };
  const logprobs = byId("logprobs").checked ? (body.messages ? ofChat : { logprobs: ALTERNATIVES }) : {};
  return { ...body, stream: true, token_sources: true, ...logprobs };
}

// Returns the tokens of a chunk's choice.
export function tokensOf({ tokens, logprobs }) {
  return tokens.map(({ text, source, margin, near_tie: nearTie }, place) => ({
    text,
    source,
    ...(nearTie ? { nearTie } : {}),
    ...(typeof margin === "number" ? { margin } : {}),
    ...probabilities(logprobs, place),
  }));
}

function probabilities(logprobs, place) {
  if (!logprobs) return {};
  const entry = logprobs.content?.[place];
  if (entry) return { logprob: entry.logprob, alternatives: entry.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob })) };
  const logprob = logprobs.token_logprobs?.[place];
  if (typeof logprob !== "number") return {};
  const top = Object.entries(logprobs.top_logprobs[place] ?? {}).map(([text, each]) => ({ text, logprob: each }));
  return { logprob, alternatives: top.sort((one, other) => other.logprob - one.logprob).slice(0, ALTERNATIVES) };
}
