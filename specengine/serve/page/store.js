// What this browser keeps: conversations, and the cycles of their answers. Where it keeps nothing, they last as long
// as the page.

const opened = new Promise((done) => {
  try {
    const asked = indexedDB.open("specengine", 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("conversations", { keyPath: "id" });
      asked.result.createObjectStore("cycles");
    };
    asked.onsuccess = () => done(asked.result);
    asked.onerror = asked.onblocked = () => done(null);
  } catch {
    done(null);
  }
});

async function within(mode, act) {
  const database = await opened;
  if (!database) return undefined;
  return new Promise((done, failed) => {
    const changes = database.transaction(["conversations", "cycles"], mode);
    const asked = act(changes.objectStore("conversations"), changes.objectStore("cycles"));
    changes.oncomplete = () => done(asked?.result);
    changes.onabort = changes.onerror = () => failed(changes.error);
  });
}

export const isKept = async () => (await opened) !== null;
export const all = async () => (await within("readonly", (conversations) => conversations.getAll())) ?? [];
export const get = (id) => within("readonly", (conversations) => conversations.get(id));
export const save = (conversation) => within("readwrite", (conversations) => void conversations.put(conversation));
// Both at once, committed without waiting: a page that is being closed gets no answer.
export const saveWithCycles = (conversation, turn, cycles) =>
  within("readwrite", (conversations, kept) => {
    conversations.put(conversation);
    kept.put(cycles, turn);
    conversations.transaction.commit();
  });
export const saveCycles = (turn, cycles) => within("readwrite", (_, kept) => void kept.put(cycles, turn));
export const cyclesOf = async (turn) => (await within("readonly", (_, kept) => kept.get(turn))) ?? [];

export const removeCycles = (turns) => within("readwrite", (_, kept) => turns.forEach((turn) => void kept.delete(turn)));

export const remove = (conversation) =>
  within("readwrite", (conversations, cycles) => {
    conversations.delete(conversation.id);
    for (const turn of Object.keys(conversation.turns)) cycles.delete(turn);
  });

// Take away the cycles of answers that no conversation has: those of a page that was closed too early to do so.
export const sweep = () =>
  within("readwrite", (conversations, cycles) => {
    conversations.getAll().onsuccess = ({ target: { result: all } }) => {
      const turns = new Set(all.flatMap((one) => Object.keys(one.turns)));
      cycles.getAllKeys().onsuccess = ({ target: { result: keys } }) => {
        for (const key of keys) if (!turns.has(key)) cycles.delete(key);
      };
    };
  });
