//! Writes the SVG elements that the charts need.

use std::fmt::{Display, Write};

/// Colours that most people can distinguish, also when printed in grey.
pub(super) const COLOURS: [&str; 6] =
    ["#555555", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#a6761d"];

pub(super) struct Svg {
    body: String,
    width: f64,
    height: f64,
}

#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    pub(super) fn new(width: f64, height: f64) -> Svg {
        Svg { body: String::new(), width, height }
    }

    pub(super) fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, fill: &str) {
        let _ = writeln!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{fill}"/>"#
        );
    }

    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, dashed: bool) {
        let dash = if dashed { r#" stroke-dasharray="4 3""# } else { "" };
        let _ = writeln!(
            self.body,
            r#"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" stroke="{colour}"{dash}/>"#,
            from.0, from.1, to.0, to.1
        );
    }

    pub(super) fn path(&mut self, points: &[(f64, f64)], colour: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            self.body,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="1.6"/>"#,
            points.join(" ")
        );
    }

    pub(super) fn text(&mut self, x: f64, y: f64, anchor: Anchor, text: impl Display) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = text.to_string().replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#
        );
    }

    /// Text that rises to the right and ends at the point.
    pub(super) fn slanted(&mut self, x: f64, y: f64, text: &str) {
        let _ = writeln!(
            self.body,
            r#"<text transform="translate({x:.1} {y:.1}) rotate(-35)" text-anchor="end">{text}</text>"#
        );
    }

    pub(super) fn finish(self) -> String {
        let Svg { body, width, height } = self;
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#222">
<rect width="100%" height="100%" fill="#ffffff"/>
{body}</svg>
"##
        )
    }
}
