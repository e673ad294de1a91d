// Draws one board with Grafana's published packages. `GET /board` says what; panels ask `POST /query`.
//
// Panel plug-ins themselves (how options reach these components) are part of Grafana's server and are not published, so
// their few lines stand here. What is real: scenes, variables and their formats, field configuration and overrides,
// units, value mappings, reducers, and the components that draw.
import React, { useEffect } from 'react';
import { createRoot } from 'react-dom/client';
import { MemoryRouter } from 'react-router-dom';
import { Observable } from 'rxjs';
import * as data from '@grafana/data';
import * as ui from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import * as runtime from '@grafana/runtime';
import * as scenes from '@grafana/scenes';

const D: any = data, U: any = ui, R: any = runtime, S: any = scenes, W: any = window;
const theme = D.createTheme();
W.drawn = {};
W.asked = [];

// Data ---------------------------------------------------------------------------------------------------

class Source extends S.RuntimeDataSource {
  async query(request: any): Promise<any> {
    const object = request.scopedVars?.__sceneObject?.value?.valueOf?.();
    const vars = { ...request.scopedVars, __rate_interval: { value: '30s' }, __range: { value: '60s' } };
    const frames: any[] = [];
    for (const target of request.targets) {
      // The DuckDB plug-in's default format quotes: what a query leaves open would come back quoted.
      const text = target.rawSql !== undefined
        ? S.sceneGraph.interpolate(object, target.rawSql, vars, 'sqlstring')
        : S.sceneGraph.interpolate(object, target.expr, vars, (value: any) => String(value));
      const body = { text, target, from: request.range.from.valueOf(), to: request.range.to.valueOf() };
      W.asked.push(text);
      const reply = await fetch('/query', { method: 'POST', body: JSON.stringify(body) }).then((r) => r.json());
      if (reply.error) throw new Error(reply.error);
      for (const frame of reply.frames) {
        frames.push(D.toDataFrame({ refId: target.refId, name: frame.name, fields: frame.fields }));
      }
    }
    return { data: frames, state: D.LoadingState.Done };
  }
  testDatasource(): any {
    return Promise.resolve({ status: 'success', message: 'ok' });
  }
}

// Panels -------------------------------------------------------------------------------------------------

const isEmpty = (panel: any) => !panel.data.series.some((frame: any) => frame.length > 0);

function reported(Component: any): any {
  return (panel: any) => {
    const title = panel.title;
    useEffect(() => {
      if (panel.data.state === D.LoadingState.Done) W.drawn[title] = { empty: isEmpty(panel) };
      if (panel.data.state === D.LoadingState.Error) W.failures.push(`${title}: ${panel.data.errors?.[0]?.message}`);
    });
    return (
      <div data-panel={title} style={{ width: panel.width, height: panel.height, overflow: 'hidden' }}>
        {isEmpty(panel) ? <div className="undrawn">No data</div> : <Component {...panel} />}
      </div>
    );
  };
}

const Series = (panel: any) => (
  <U.TimeSeries theme={theme} frames={panel.data.series} structureRev={panel.data.structureRev ?? 1}
    timeRange={panel.timeRange} timeZone="utc" width={panel.width} height={panel.height}
    legend={panel.options.legend} options={panel.options}>{() => null}</U.TimeSeries>
);

const values = (panel: any) => D.getFieldDisplayValues({
  fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions, replaceVariables: panel.replaceVariables,
  theme, data: panel.data.series, timeZone: 'utc',
});

const Stat = (panel: any) => (
  <U.VizRepeater getValues={() => values(panel)} source={panel.data} width={panel.width} height={panel.height}
    orientation="auto" renderCounter={panel.renderCounter} itemSpacing={8}
    renderValue={({ value, width, height, count }: any) => (
      <U.BigValue value={value.display} count={count} colorMode={panel.options.colorMode} graphMode="none"
        justifyMode={panel.options.justifyMode} textMode={count > 1 ? 'value_and_name' : 'auto'} theme={theme}
        width={width} height={height} />
    )} />
);

const Bars = (panel: any) => (
  <U.VizRepeater getValues={() => values(panel)} source={panel.data} width={panel.width} height={panel.height}
    orientation={panel.options.orientation} renderCounter={panel.renderCounter} itemSpacing={8} minVizHeight={16}
    renderValue={({ value, width, height }: any) => (
      <U.BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)}
        text={panel.options.text} theme={theme} width={width} height={height} orientation={panel.options.orientation}
        displayMode={panel.options.displayMode} showUnfilled={panel.options.showUnfilled} itemSpacing={8} lcdCellWidth={12} />
    )} />
);

const Rows = (panel: any) => (
  D.cacheFieldDisplayNames(panel.data.series),
  <TableNG data={panel.data.series[0]} width={panel.width} height={panel.height} structureRev={1} timeRange={panel.timeRange}
    noHeader={false} showTypeIcons={false} cellHeight={panel.options.cellHeight} fieldConfig={panel.fieldConfig}
    getActions={() => []} replaceVariables={panel.replaceVariables} {...({} as any)} />
);

const Undrawn = (panel: any) => (
  <div className="undrawn">{panel.data.series[0].length} spans; this panel is drawn by Grafana's server only.</div>
);

const CUSTOM: Record<string, any> = {
  drawStyle: 'line', lineWidth: 1, fillOpacity: 0, showPoints: 'never', pointSize: 5, axisPlacement: 'auto',
  axisLabel: '', hideFrom: { legend: false, tooltip: false, viz: false }, stacking: { mode: 'none', group: 'A' },
  scaleDistribution: { type: 'linear' }, lineInterpolation: 'linear', spanNulls: false, thresholdsStyle: { mode: 'off' },
  barAlignment: 0, barWidthFactor: 0.6, gradientMode: 'none', cellOptions: { type: 'auto' }, width: undefined,
  minWidth: undefined, align: 'auto', filterable: false, inspect: false, hidden: false, wrapText: false,
};

function panelPlugin(id: string, Component: any): any {
  const plugin: any = new D.PanelPlugin(reported(Component));
  plugin.useFieldConfig({
    useCustomConfig: (builder: any) => {
      for (const [path, defaultValue] of Object.entries(CUSTOM)) {
        builder.addCustomEditor({ id: path, path, name: path, defaultValue, editor: () => null, override: () => null,
          process: D.identityOverrideProcessor, shouldApply: () => true });
      }
    },
  });
  plugin.meta = { id, name: id, info: { logos: { small: '', large: '' }, version: '' }, baseUrl: '', module: '', sort: 0, type: 'panel' };
  return plugin;
}

// Grafana's surroundings, as far as the packages ask for them ---------------------------------------------

function setUp(): void {
  R.config.theme2 = theme;
  R.config.bootData = R.config.bootData ?? { user: {}, settings: {}, navTree: [] };
  const processors: Record<string, any> = {
    unit: D.unitOverrideProcessor, min: D.numberOverrideProcessor, max: D.numberOverrideProcessor,
    decimals: D.numberOverrideProcessor, displayName: D.stringOverrideProcessor, color: D.identityOverrideProcessor,
    thresholds: D.thresholdsOverrideProcessor, mappings: D.valueMappingsOverrideProcessor, noValue: D.stringOverrideProcessor,
    links: D.dataLinksOverrideProcessor, filterable: D.identityOverrideProcessor, fieldMinMax: D.identityOverrideProcessor,
  };
  D.standardFieldConfigEditorRegistry.setInit(() => Object.entries(processors).map(([id, process]) => ({
    id, path: id, name: id, process, override: () => null, editor: () => null, shouldApply: () => true, settings: {}, category: [],
  })));
  D.standardEditorsRegistry.setInit(() => []);
  R.setPluginImportUtils({ importPanelPlugin: (id: string) => Promise.reject(new Error(`no panel ${id}`)), getPanelPluginFromCache: () => undefined });
  R.setTemplateSrv({ replace: (text: any) => text, getVariables: () => [], containsTemplate: () => false, updateTimeRange: () => {} });
  R.setDataSourceSrv({ get: () => Promise.reject(new Error('no such data source')), getList: () => [], getInstanceSettings: () => undefined, reload: () => {} });
  R.setAppEvents(new D.EventBusSrv());
  R.setLocationSrv?.({ update() {} });
  R.setChromeHeaderHeightHook?.(() => 0);
  R.setRunRequest((source: any, request: any) => new Observable((out: any) => {
    source.query(request).then(
      (reply: any) => { out.next({ state: 'Done', series: reply.data, timeRange: request.range, request }); out.complete(); },
      (error: any) => { out.next({ state: 'Error', series: [], errors: [{ message: error.message }], timeRange: request.range, request }); out.complete(); },
    );
  }));
  for (const [id, Component] of Object.entries({ timeseries: Series, stat: Stat, bargauge: Bars, table: Rows, traces: Undrawn })) {
    S.sceneUtils.registerRuntimePanelPlugin({ pluginId: id, plugin: panelPlugin(id, Component) });
  }
}

// The board ----------------------------------------------------------------------------------------------

function variable(known: any, choice: any): any {
  const { name, label, allValue, includeAll } = known;
  if (known.type === 'textbox') return new S.TextBoxVariable({ name, label, value: choice.value });
  const query = choice.options.map((option: string) => option.replaceAll(',', '\\,')).join(',');
  return new S.CustomVariable({ name, label, query, value: choice.value, text: choice.value === '$__all' ? 'All' : choice.value, includeAll, allValue: allValue ?? undefined });
}

function gridItem(panel: any): any {
  const { x, y, w, h } = panel.gridPos;
  const $data = new S.SceneQueryRunner({ datasource: panel.datasource, queries: panel.targets,
    maxDataPoints: panel.maxDataPoints ?? 300, minInterval: panel.interval });
  const body = new S.VizPanel({ pluginId: panel.type, title: panel.title, options: panel.options, fieldConfig: panel.fieldConfig ?? { defaults: {}, overrides: [] }, $data });
  return new S.SceneGridItem({ x, y, width: w, height: h, body });
}

function grid(panels: any[]): any[] {
  const rows: any[] = [];
  for (const panel of panels) {
    if (panel.type === 'row') rows.push({ title: panel.title, y: panel.gridPos.y, children: [] });
    else rows[rows.length - 1].children.push(gridItem(panel));
  }
  return rows.map(({ title, y, children }) => new S.SceneGridRow({ title, y, isCollapsed: false, isCollapsible: false, children }));
}

async function main(): Promise<void> {
  setUp();
  const { board, range, choices, width } = await fetch('/board').then((reply) => reply.json());
  for (const panel of board.panels.filter((one: any) => one.type !== 'row')) {
    const { type, uid } = panel.datasource;
    try { S.sceneUtils.registerRuntimeDataSource({ dataSource: new Source(type, uid) }); } catch { /* known from a panel before */ }
  }
  const scene = new S.EmbeddedScene({
    $timeRange: new S.SceneTimeRange({ from: new Date(range.from).toISOString(), to: new Date(range.to).toISOString(), timeZone: 'utc' }),
    $variables: new S.SceneVariableSet({ variables: board.templating.list.map((known: any) => variable(known, choices[known.name])) }),
    controls: [new S.VariableValueSelectors({}), new S.SceneControlsSpacer(), new S.SceneTimePicker({})],
    body: new S.SceneGridLayout({ children: grid(board.panels), isLazy: false }),
  });
  const height = Math.max(...board.panels.map((panel: any) => panel.gridPos.y + panel.gridPos.h)) * 38 + 120;
  W.boardHeight = height;
  scene.activate();
  createRoot(document.getElementById('root')!).render(
    <D.ThemeContext.Provider value={theme}>
      <MemoryRouter>
        <U.PortalContainer />
        <div style={{ width, height, display: 'flex', color: theme.colors.text.primary }}>
          {U.GlobalStyles ? <U.GlobalStyles /> : null}<scene.Component model={scene} /></div>
      </MemoryRouter>
    </D.ThemeContext.Provider>,
  );
}

main().catch((error) => W.failures.push(String(error.stack)));
