// Colours and frames of all charts. They come from the style sheet, so that screen, dark and print agree with the page.

const darkScreen = matchMedia("(prefers-color-scheme: dark)");
const onPaper = () => document.documentElement.classList.contains("paper");
const isDark = () => darkScreen.matches && !onPaper();
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Plotly reads tags in texts; names from run folders must stay as they are.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function template() {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--soft"), automargin: true };
  return {
    layout: {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
      xaxis: axis,
      yaxis: axis,
    },
  };
}

function draw(node, traces, layout) {
  const small = innerWidth < 700 || onPaper(); // no room for buttons, or no use
  Plotly.react(
    node,
    traces,
    {
      template: template(),
      width: node.clientWidth,
      height: small ? 260 : 320,
      margin: { l: 48, r: 12, t: small ? 8 : 28, b: 44 },
      showlegend: false,
      // On a touch screen a finger scrolls the page; elsewhere dragging zooms.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      ...layout,
    },
    {
      displaylogo: false,
      displayModeBar: !small,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      toImageButtonOptions: { format: "svg", filename: node.dataset.key ?? node.id },
    },
  );
}
