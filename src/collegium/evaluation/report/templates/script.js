/* Pages by hash, light and dark, charts that answer to the pointer, and the case browser. */
(function () {
  "use strict";
  var root = document.documentElement;
  var all = function (selector, within) {
    return Array.from((within || document).querySelectorAll(selector));
  };

  /* pages */
  var links = all("nav a");

  function show(moved) {
    var name = decodeURIComponent(location.hash.slice(1));
    var target = name ? document.getElementById(name) : null;
    var page = target ? target.closest(".page") : null;
    if (!page) {
      if (name) return;
      page = document.querySelector(".page");
    }
    all(".page").forEach(function (each) { each.classList.toggle("shown", each === page); });
    links.forEach(function (link) {
      if (link.hash === "#" + page.id) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
    if (!moved) return;
    page.querySelector("h2").focus({preventScroll: true});
    if (target && target !== page) target.scrollIntoView();
    else window.scrollTo(0, 0);
  }
  window.addEventListener("hashchange", function () { show(true); });
  show(false);

  /* light and dark */
  var night = window.matchMedia("(prefers-color-scheme: dark)");
  var theme = document.getElementById("theme");
  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : night.matches;
  }
  function nameTheme() { theme.textContent = isDark() ? "Light" : "Dark"; }
  theme.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  night.addEventListener("change", nameTheme);
  nameTheme();

  /* print */
  var closed = [];
  window.addEventListener("beforeprint", function () {
    closed = all("details:not([open])");
    closed.forEach(function (fold) { fold.open = true; });
  });
  window.addEventListener("afterprint", function () {
    closed.forEach(function (fold) { fold.open = false; });
  });

  /* charts: the legend hides lines, the pointer names the nearest one */
  all(".curves").forEach(function (group) {
    all(".legend button", group).forEach(function (button) {
      button.addEventListener("click", function () {
        var pressed = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(pressed));
        all(".line." + button.dataset.key, group).forEach(function (line) {
          line.classList.toggle("off", !pressed);
        });
      });
      button.addEventListener("pointerenter", function () { light(group, button.dataset.key); });
      button.addEventListener("pointerleave", function () { light(group, ""); });
    });
    all("svg.chart", group).forEach(function (chart) {
      chart.addEventListener("pointermove", function (event) {
        var found = nearest(chart, event);
        light(group, found ? found.key : "");
        read(chart, found ? found.text : "");
      });
      chart.addEventListener("pointerleave", function () { light(group, ""); read(chart, ""); });
    });
  });

  function light(group, key) {
    group.classList.toggle("lit", Boolean(key));
    all(".line", group).forEach(function (line) {
      line.classList.toggle("on", Boolean(key) && line.classList.contains(key));
    });
  }

  function read(chart, text) {
    var place = chart.parentElement.querySelector(".readout");
    if (place) place.textContent = text;
  }

  function nearest(chart, event) {
    var to = chart.getScreenCTM().inverse();
    var at = new DOMPoint(event.clientX, event.clientY).matrixTransform(to);
    var best = null;
    all(".line:not(.off)", chart).forEach(function (line) {
      var point = Array.from(line.firstChild.points).reduce(function (found, each) {
        return Math.abs(each.x - at.x) < Math.abs(found.x - at.x) ? each : found;
      });
      var far = Math.abs(point.y - at.y);
      if (!best || far < best.far) best = {far: far, line: line, point: point};
    });
    if (!best || best.far > 40) return null;
    var value = function (axis, place) { /* drawn from, drawn to, value there, value here */
      var ends = chart.dataset[axis].split(" ").map(Number);
      return ends[2] + (place - ends[0]) / (ends[1] - ends[0]) * (ends[3] - ends[2]);
    };
    var x = Math.round(value("x", best.point.x)), y = value("y", best.point.y);
    var text = best.line.dataset.name + ", " + chart.dataset.over + " " + x + ": " + y.toFixed(3);
    return {key: best.line.classList[1], text: text};
  }

  /* the case browser */
  var viewer = document.getElementById("viewer");
  if (viewer) browse(viewer);

  function browse(viewer) {
    var stage = viewer.querySelector(".stage"), heading = viewer.querySelector("h2");
    var about = viewer.querySelector(".about"), layers = all("[data-layer]", viewer);
    var buttons = [], current = null, picture = null, view = {scale: 1, x: 0, y: 0};

    all(".case").forEach(function (button) {
      button.addEventListener("click", function () {
        buttons = all(".case", button.closest(".page"));
        viewer.showModal();
        open(button);
      });
    });

    function open(button) {
      current = button;
      picture = button.querySelector(".picture").cloneNode(true);
      heading.textContent = button.dataset.title;
      about.textContent = button.dataset.about + "  (" + (buttons.indexOf(button) + 1) + " of " + buttons.length + ")";
      stage.replaceChildren(picture);
      layers.forEach(function (box) {
        box.disabled = !picture.querySelector(".layer." + box.dataset.layer);
      });
      fit();
    }

    function fit() {
      var ratio = Number(picture.dataset.width) / Number(picture.dataset.height);
      var width = Math.min(stage.clientWidth, stage.clientHeight * ratio);
      picture.style.width = width + "px";
      view = {scale: 1, x: 0, y: 0};
      place();
    }

    function place() {
      view.scale = Math.min(16, Math.max(1, view.scale));
      var wide = picture.offsetWidth * (view.scale - 1), high = picture.offsetHeight * (view.scale - 1);
      view.x = Math.min(0, Math.max(-wide, view.x));
      view.y = Math.min(0, Math.max(-high, view.y));
      picture.style.transform = "translate(" + view.x + "px," + view.y + "px) scale(" + view.scale + ")";
      stage.classList.toggle("close", view.scale * picture.offsetWidth > 1.9 * picture.dataset.width);
    }

    function zoom(factor, x, y) {
      var box = picture.getBoundingClientRect();
      var before = view.scale;
      var left = x === undefined ? picture.offsetWidth / 2 : x - box.left + view.x;
      var top = y === undefined ? picture.offsetHeight / 2 : y - box.top + view.y;
      view.scale = Math.min(16, Math.max(1, before * factor));
      view.x = left - (left - view.x) * view.scale / before;
      view.y = top - (top - view.y) * view.scale / before;
      place();
    }

    function pan(x, y) { view.x += x; view.y += y; place(); }

    function step(by) {
      open(buttons[(buttons.indexOf(current) + by + buttons.length) % buttons.length]);
    }

    /* the same case under the next method, else the next picture with the same rank */
    function other(by) {
      var methods = [];
      buttons.forEach(function (button) {
        if (button.dataset.site === current.dataset.site && methods.indexOf(button.dataset.method) < 0) {
          methods.push(button.dataset.method);
        }
      });
      var next = methods[(methods.indexOf(current.dataset.method) + by + methods.length) % methods.length];
      var there = buttons.filter(function (button) {
        return button.dataset.site === current.dataset.site && button.dataset.method === next;
      });
      var like = function (key) {
        return there.find(function (button) { return button.dataset[key] === current.dataset[key]; });
      };
      open(like("case") || like("rank") || there[0]);
    }

    function toggle(name) {
      var box = layers.find(function (each) { return each.dataset.layer === name; });
      if (!box.disabled) { box.checked = !box.checked; apply(); }
    }

    function apply() {
      layers.forEach(function (box) {
        var name = box.dataset.layer;
        if (name === "errors") viewer.classList.toggle("show-errors", box.checked);
        else viewer.classList.toggle("hide-" + name, !box.checked);
      });
    }

    var far = 60;
    var keys = {
      ArrowRight: function (shift) { if (shift) pan(-far, 0); else step(1); },
      ArrowLeft: function (shift) { if (shift) pan(far, 0); else step(-1); },
      ArrowDown: function (shift) { if (shift) pan(0, -far); else other(1); },
      ArrowUp: function (shift) { if (shift) pan(0, far); else other(-1); },
      "+": function () { zoom(1.5); },
      "=": function () { zoom(1.5); },
      "-": function () { zoom(1 / 1.5); },
      "0": function () { fit(); },
      t: function () { toggle("truth"); },
      p: function () { toggle("prediction"); },
      e: function () { toggle("errors"); }
    };
    viewer.addEventListener("keydown", function (event) {
      var act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act(event.shiftKey);
    });
    var tools = {
      next: function () { step(1); }, previous: function () { step(-1); },
      down: function () { other(1); }, up: function () { other(-1); },
      closer: function () { zoom(1.5); }, farther: function () { zoom(1 / 1.5); },
      whole: function () { fit(); }, close: function () { viewer.close(); }
    };
    all("[data-tool]", viewer).forEach(function (button) {
      button.addEventListener("click", tools[button.dataset.tool]);
    });
    layers.forEach(function (box) { box.addEventListener("change", apply); });
    viewer.addEventListener("close", function () {
      stage.replaceChildren();
      var fold = current.closest("details");
      if (fold) fold.open = true;
      current.focus();
    });
    window.addEventListener("resize", function () { if (viewer.open) fit(); });
    stage.addEventListener("wheel", function (event) {
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.25 : 0.8, event.clientX, event.clientY);
    }, {passive: false});
    stage.addEventListener("pointerdown", function (event) { stage.setPointerCapture(event.pointerId); });
    stage.addEventListener("pointermove", function (event) {
      if (event.buttons & 1) pan(event.movementX, event.movementY);
    });
  }
})();
