// The search runs in a worker, which browsers refuse to pages from disk. There it gets a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      window.addEventListener("message", ({ source, data }) => {
        if (source !== this.inside) return
        this.dispatchEvent(new MessageEvent("message", { data }))
        if (this.onmessage) this.onmessage({ data })
      })
      this.ready = new Promise(resolve => { this.inside.resolve = resolve })
      const page = frame.contentDocument
      page.open()
      page.write(`<script>
        postMessage = data => parent.postMessage(data, "*")
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() =>
          new Promise((done, failed) => {
            const script = document.createElement("script")
            Object.assign(script, { src: url, onload: done, onerror: failed })
            document.body.appendChild(script)
          })), Promise.resolve())
      <\/script><body><script src="${url}" onload="resolve()"><\/script>`)
      page.close()
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
