/** A row at one glance: a line of pixels for some tokens, dark where they are trained. */

/** @param {HTMLCanvasElement} canvas @param {import("./row.js").Row} row @param {number} at the first token in view */
export function drawMinimap(canvas, row, at) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  canvas.width = width;
  canvas.height = height;
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const style = getComputedStyle(canvas);
  pen.fillStyle = style.getPropertyValue("--trained");
  const shares = trainedShares(row.mask, height);
  shares.forEach((share, y) => {
    pen.globalAlpha = share && 0.25 + 0.75 * share;
    pen.fillRect(2, y, width - 4, 1);
  });
  pen.globalAlpha = 1;
  pen.fillStyle = style.getPropertyValue("--text");
  pen.fillRect(0, Math.round((at / row.length) * height), width, 2);
}

/** The share of trained tokens in each of `parts` parts of a row. @param {Uint8Array} mask @param {number} parts */
export function trainedShares(mask, parts) {
  const shares = new Float32Array(parts);
  for (let part = 0; part < parts; part += 1) {
    const from = Math.floor((part * mask.length) / parts);
    const to = Math.max(from + 1, Math.floor(((part + 1) * mask.length) / parts));
    let trained = 0;
    for (let at = from; at < to && at < mask.length; at += 1) trained += mask[at];
    shares[part] = trained / (to - from);
  }
  return shares;
}
