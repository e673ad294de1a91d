// Bundles page.tsx into one script: node build.mjs ENTRY OUTFILE
import { build } from 'esbuild';

const [entryPoints, outfile] = [[process.argv[2]], process.argv[3]];

// @grafana/scenes reaches react-router 6 through its compatibility package, which wants version 5 beside it.
const olderRouter = {
  name: 'older-router',
  setup(at) {
    at.onResolve({ filter: /^(react-router-dom|react-router|history)$/ }, (args) => {
      if (args.pluginData === 'resolved') return undefined;
      const from = args.importer.replaceAll('\\', '/');
      const compat = from.includes('node_modules/react-router-dom-v5-compat/');
      const five = /node_modules\/(rrd5|rr5)\//.test(from);
      const to = compat ? { 'react-router-dom': 'rrd5' } : five ? { 'react-router': 'rr5', history: 'h4' } : {};
      if (!to[args.path]) return undefined;
      return at.resolve(to[args.path], { resolveDir: args.resolveDir, kind: args.kind, pluginData: 'resolved' });
    });
  },
};

await build({
  entryPoints,
  outfile,
  bundle: true,
  minify: true,
  format: 'iife',
  platform: 'browser',
  target: 'chrome120',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.svg': 'dataurl', '.png': 'dataurl', '.woff2': 'dataurl', '.woff': 'dataurl', '.ttf': 'dataurl' },
  logLevel: 'warning',
  plugins: [olderRouter],
});
