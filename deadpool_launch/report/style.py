"""The page's colours and shapes, for light and dark, screens and telephones."""

STYLE = """
:root{color-scheme:light dark;--paper:#fbfbf9;--card:#fff;--ink:#1d2329;--soft:#5b6670;
--line:#dfe3e6;--good:#1a7f5a;--bad:#c0352b;--warn:#b26a00;--blue:#2b6cb0;--shade:#2b6cb066;
--band:#c0352b2e;--p-productive:#2f9e73;--p-recovery:#c0352b;--p-cut:#d9776e;--p-again:#e7aaa4;
--p-copies:#e0a030;--p-between:#6f9fd0;--p-start:#8d99a5;--p-end:#aab4bd;--p-spare:#c9d6e6;
--p-lost:#7c2a24;--p-other:#d5d9dc}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--card:#1c2227;--ink:#e6eaed;
--soft:#9aa7b2;--line:#333c44;--good:#4cc795;--bad:#f0776c;--warn:#e0a030;--blue:#6fb0ee;
--shade:#6fb0ee66;--band:#f0776c38;--p-productive:#3fae82;--p-recovery:#e2594d;--p-cut:#c4655c;
--p-again:#8d4d48;--p-copies:#c98c22;--p-between:#4f81b5;--p-start:#6a7681;--p-end:#525d67;
--p-spare:#3b4d61;--p-lost:#a8483f;--p-other:#3a4249}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
main{max-width:940px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:1.5rem;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.12rem;margin:34px 0 10px}
h3{font-size:1rem;margin:0 0 8px;overflow-wrap:anywhere}
p{margin:6px 0;overflow-wrap:anywhere}
.soft{color:var(--soft)}
.badge{display:inline-block;border-radius:999px;padding:1px 11px;font-size:.86rem;font-weight:600;
border:1px solid currentColor;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(112px,1fr));gap:10px;margin:18px 0}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:12px 14px}
.card{margin:0 0 14px}
.tile b{display:block;font-size:1.22rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.84rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--soft);font-size:.84rem}
td,th{padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
table.rows td:first-child{white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
code{font:.88em/1.4 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;
background:var(--paper);border:1px solid var(--line);border-radius:5px;padding:1px 6px;
overflow-wrap:anywhere}
ul{margin:4px 0;padding-left:18px}
details summary{cursor:pointer;color:var(--soft)}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}
svg{display:block;max-width:100%;height:auto}
svg text{font-size:11.5px;fill:var(--soft)}
svg text.label{fill:var(--ink);font-size:12.5px}
svg text.bandlabel{fill:var(--bad);font-weight:600}
.grid{stroke:var(--line);fill:none}
.bar{fill:var(--blue)}.slow{fill:var(--bad)}.fault{fill:var(--warn)}
.line{stroke:var(--blue);fill:none;stroke-width:1.5;stroke-linejoin:round}
.shade{fill:var(--shade)}.dot{fill:var(--blue)}.over{fill:var(--soft)}.over.all{fill:var(--bad)}
.band{fill:var(--band)}
.part{fill:var(--p-other);background:var(--p-other)}
.part.productive{fill:var(--p-productive);background:var(--p-productive)}
.part.recovery{fill:var(--p-recovery);background:var(--p-recovery)}
.part.cut{fill:var(--p-cut);background:var(--p-cut)}
.part.again{fill:var(--p-again);background:var(--p-again)}
.part.copies{fill:var(--p-copies);background:var(--p-copies)}
.part.between{fill:var(--p-between);background:var(--p-between)}
.part.start{fill:var(--p-start);background:var(--p-start)}
.part.end,.part.open{fill:var(--p-end);background:var(--p-end)}
.part.spare{fill:var(--p-spare);background:var(--p-spare)}
.part.lost,.part.worn{fill:var(--p-lost);background:var(--p-lost)}
.narrow{display:none}
@media (max-width:640px){main{padding:16px 12px 36px}.wide{display:none}.narrow{display:block}
.tiles{grid-template-columns:1fr 1fr}.tile:last-child:nth-child(odd){grid-column:span 2}
table.rows thead{display:none}table.rows tr{display:block;padding:7px 0;
border-bottom:1px solid var(--line)}table.rows tr:last-child{border-bottom:0}
table.rows td{display:block;border:0;padding:1px 0}}
@media print{.card,.tile{break-inside:avoid}}
"""
