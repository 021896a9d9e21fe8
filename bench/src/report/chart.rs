//! Charts of results as SVG.

use super::svg::{Anchor, COLOURS, Svg};

const LEFT: f64 = 64.0;
const TOP: f64 = 48.0;
const GRID: &str = "#dddddd";

/// The data of one line, or of the bars of one colour.
pub(crate) struct Series<P> {
    pub(crate) name: String,
    pub(crate) points: Vec<P>,
}

/// A vertical line at a value of the x axis.
pub(crate) struct Mark {
    pub(crate) name: String,
    pub(crate) x: f64,
}

/// A bar chart with a group of bars for each name, and a bar in each group for each series.
pub(crate) fn grouped_bars(
    title: &str,
    unit: &str,
    groups: &[String],
    series: &[Series<f64>],
) -> String {
    const HEIGHT: f64 = 260.0;
    const BAR: f64 = 12.0;
    let group_width = BAR * series.len() as f64 + 14.0;
    let width = (group_width * groups.len() as f64).max(320.0);
    let mut svg = Svg::new(LEFT + width + 20.0, TOP + HEIGHT + 110.0);
    let top = series.iter().flat_map(|s| s.points.iter().copied()).fold(0.0, f64::max);
    let scale = Scale::new(0.0, top, HEIGHT);
    frame(&mut svg, title, unit, width, HEIGHT, &scale, series.iter().map(|s| s.name.as_str()));
    for (at, group) in groups.iter().enumerate() {
        let x = LEFT + at as f64 * group_width + 7.0;
        for (bar, one) in series.iter().enumerate() {
            let height = scale.length(one.points[at]);
            let left = x + bar as f64 * BAR;
            svg.rect(left, TOP + HEIGHT - height, BAR - 1.0, height, colour(bar));
        }
        svg.slanted(x + group_width / 2.0 - 4.0, TOP + HEIGHT + 14.0, group);
    }
    svg.finish()
}

/// A line chart.
pub(crate) fn lines(
    title: &str,
    unit: &str,
    x_unit: &str,
    series: &[Series<(f64, f64)>],
    marks: &[Mark],
) -> String {
    const WIDTH: f64 = 760.0;
    const HEIGHT: f64 = 260.0;
    let mut svg = Svg::new(LEFT + WIDTH + 20.0, TOP + HEIGHT + 60.0);
    let all = || series.iter().flat_map(|s| s.points.iter());
    let top = all().map(|p| p.1).fold(0.0, f64::max);
    let first = all().map(|p| p.0).reduce(f64::min).unwrap_or(0.0);
    let last = all().map(|p| p.0).reduce(f64::max).unwrap_or(1.0);
    let (across, up) = (Scale::new(first, last, WIDTH), Scale::new(0.0, top, HEIGHT));
    frame(&mut svg, title, unit, WIDTH, HEIGHT, &up, series.iter().map(|s| s.name.as_str()));
    let bottom = TOP + HEIGHT;
    for tick in across.ticks() {
        let x = LEFT + across.length(tick);
        svg.line((x, bottom), (x, bottom + 4.0), "#222222", false);
        svg.text(x, bottom + 17.0, Anchor::Middle, tick_label(tick));
    }
    svg.text(LEFT + WIDTH / 2.0, bottom + 36.0, Anchor::Middle, x_unit);
    for mark in marks {
        let x = LEFT + across.length(mark.x);
        svg.line((x, TOP), (x, bottom), "#999999", true);
        svg.text(x + 3.0, TOP + 10.0, Anchor::Start, &mark.name);
    }
    for (at, one) in series.iter().enumerate() {
        let place = |&(x, y): &(f64, f64)| (LEFT + across.length(x), bottom - up.length(y));
        svg.path(&one.points.iter().map(place).collect::<Vec<_>>(), colour(at));
    }
    svg.finish()
}

fn colour(at: usize) -> &'static str {
    COLOURS[at % COLOURS.len()]
}

/// Title, legend, y axis and grid.
fn frame<'a>(
    svg: &mut Svg,
    title: &str,
    unit: &str,
    width: f64,
    height: f64,
    scale: &Scale,
    names: impl Iterator<Item = &'a str>,
) {
    svg.text(LEFT, 16.0, Anchor::Start, format!("{title} ({unit})"));
    let mut x = LEFT;
    for (at, name) in names.enumerate() {
        svg.rect(x, 26.0, 10.0, 10.0, colour(at));
        svg.text(x + 14.0, 35.0, Anchor::Start, name);
        x += 30.0 + 6.5 * name.chars().count() as f64;
    }
    for tick in scale.ticks() {
        let y = TOP + height - scale.length(tick);
        svg.line((LEFT, y), (LEFT + width, y), GRID, false);
        svg.text(LEFT - 6.0, y + 4.0, Anchor::End, tick_label(tick));
    }
}

fn tick_label(value: f64) -> String {
    match value.abs() {
        v if v >= 1e6 => format!("{:.1}M", value / 1e6),
        v if v >= 1e4 => format!("{:.0}k", value / 1e3),
        v if v >= 10.0 || value.fract() == 0.0 => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    }
}

/// Maps values of an axis to lengths in pixels.
struct Scale {
    from: f64,
    to: f64,
    pixels: f64,
}

impl Scale {
    fn new(from: f64, to: f64, pixels: f64) -> Scale {
        Scale { from, to: if to > from { to } else { from + 1.0 }, pixels }
    }

    fn length(&self, value: f64) -> f64 {
        (value - self.from) / (self.to - self.from) * self.pixels
    }

    /// About five round values.
    fn ticks(&self) -> Vec<f64> {
        let rough = (self.to - self.from) / 5.0;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * magnitude).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.from / step).ceil() as i64;
        (first..).map(|at| at as f64 * step).take_while(|tick| *tick <= self.to * 1.0001).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Mark, Scale, Series, grouped_bars, lines};

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(Scale::new(0.0, 43.0, 100.0).ticks(), [0.0, 10.0, 20.0, 30.0, 40.0]);
    }

    #[test]
    fn charts_without_values_are_drawn() {
        let empty = Series { name: "a".into(), points: vec![] };
        let mark = Mark { name: "m".into(), x: 0.0 };
        assert!(lines("t", "u", "s", &[empty], &[mark]).ends_with("</svg>\n"));
        let none = Series { name: "a".into(), points: vec![0.0] };
        assert!(grouped_bars("t", "u", &["g".into()], &[none]).ends_with("</svg>\n"));
    }
}
