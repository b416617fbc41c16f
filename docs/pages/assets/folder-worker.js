/* Search without a server.  Browsers refuse workers to pages that are opened from a folder (file:), and the theme's
   search is one.  There, a worker is a hidden frame that runs the same script; "IFrameWorker" is the name by which
   that script finds the folder of its languages. */
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const page = frame.contentDocument
      page.open()
      page.write(`<script src="${new URL(url, document.baseURI)}"><\/script>`)
      page.close()
      frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow)))
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
