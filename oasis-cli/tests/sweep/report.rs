//! The report in a browser: its script is part of what is delivered.

use crate::{SWEEP, folder, run};
use serde_json::{Value, json};
use std::io::Write;
use std::process::Command;

/// Clicks a name in the legend and a head of the table, writes a word into the filter, and leaves what is then to be seen.
const VISITOR: &str = r#"<script>
const figure = document.querySelector('figure[data-name="eval-coverage-mean"]');
const table = document.querySelector("table.sortable");
const click = (element) => element.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const dots = () => [...figure.querySelectorAll("circle")].filter((dot) => getComputedStyle(dot.parentElement).display !== "none").length;
const column = [...table.querySelectorAll("th")].findIndex((head) => head.textContent === "mean");
const rows = () => [...table.tBodies[0].rows].filter((row) => getComputedStyle(row).display !== "none");
const means = () => rows().map((row) => Number(row.cells[column].dataset.value));
const seen = { dots: [dots()], rows: [rows().length] };
const key = figure.querySelector("g.key");
for (let times = 0; times < 2; times += 1) { click(key); seen.dots.push(dots()); }
const head = table.querySelectorAll("th")[column];
click(head); seen.rising = means();
click(head); seen.falling = means();
const filter = document.querySelector("input");
for (const text of ["last-query", "last-query 0.3", "nothing", ""]) {
  filter.value = text;
  filter.dispatchEvent(new Event("input"));
  seen.rows.push(rows().length);
}
const left = document.createElement("pre");
left.id = "seen";
left.textContent = JSON.stringify(seen);
document.body.append(left);
</script>
</body>"#;

/// A browser of Chromium's family: `OASIS_BROWSER`, or one of the usual names; said aloud where there is none, and a
/// failure where `OASIS_REQUIRE_BROWSER` is set.
fn browser() -> Option<String> {
    let named = std::env::var("OASIS_BROWSER").ok();
    let usual = ["chromium", "chromium-browser", "google-chrome"].map(str::to_owned);
    let runs = |name: &String| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    let found = named.into_iter().chain(usual).find(runs);
    if found.is_none() {
        assert!(std::env::var_os("OASIS_REQUIRE_BROWSER").is_none(), "no browser was found");
        // Not by `eprintln!`, which the harness keeps to itself when a test passes.
        let what = "SKIPPED for a browser, which is missing: chromium, or OASIS_BROWSER names one";
        let _ = writeln!(std::io::stderr(), "{what}");
    }
    found
}

#[test]
fn the_report_answers_clicks_and_words() {
    let Some(browser) = browser() else { return };
    let folder = folder(&SWEEP.replace("[0.01, 0.1, 0.3, 1.0]", "[0.3, 1.0]"));
    let (code, out, err) = run(folder.path(), &["tiny.toml"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let report = std::fs::read_to_string(folder.path().join("sweeps/tiny/report.html")).unwrap();
    assert_eq!(report.matches("</body>").count(), 1);
    let page = folder.path().join("visited.html");
    std::fs::write(&page, report.replace("</body>", VISITOR)).unwrap();

    let mut command = Command::new(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", folder.path().join("browser").display()));
    command.arg(format!("file://{}", page.display())).env("HOME", folder.path());
    let output = command.output().unwrap();
    let (page, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let seen = page.split("<pre id=\"seen\">").nth(1).and_then(|rest| rest.split("</pre>").next());
    let seen: Value = serde_json::from_str(seen.unwrap_or_else(|| panic!("the script did not end\n{err}"))).unwrap();

    // 12 points in 6 series of 2 dots; a third of the rows has the last query, half of those the cap.
    assert_eq!((&seen["dots"], &seen["rows"]), (&json!([12, 10, 12]), &json!([12, 4, 2, 0, 12])), "{seen}");
    let means = |order: &str| -> Vec<f64> {
        seen[order].as_array().unwrap().iter().map(|mean| mean.as_f64().unwrap()).collect()
    };
    let (rising, mut falling) = (means("rising"), means("falling"));
    assert!(rising.len() == 12 && rising.is_sorted() && rising[0] < rising[11], "{seen}");
    falling.reverse();
    assert_eq!(rising, falling);
}
