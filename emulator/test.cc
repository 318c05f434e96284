#include "kernels/backward.h"
#include "device/element.cuh"
using namespace streammoe; using namespace streammoe::sm90;
#include <string>
#include <cmath>
static bool F16;
using V16 = std::vector<uint16_t>;
static double w16(uint16_t u) { return emu_widen(F16, u); }
static std::mt19937 rg(7);
static double nrm() { static std::normal_distribution<double> n; return n(rg); }
static V16 rnd(size_t n, double s) { V16 v(n); for (auto& x : v) x = emu_round(F16, float(nrm() * s)); return v; }
struct AlignedBuf { std::vector<uint8_t> raw; uint8_t* p; AlignedBuf(size_t n) : raw(n + 1024, 0xFF) { p = raw.data() + (1024 - reinterpret_cast<uintptr_t>(raw.data()) % 1024); } };
struct Out { V16 raw; uint16_t* p; size_t n; Out(size_t n_) : raw(n_ + 64, 0xFFFF), n(n_) { size_t off = 0; while (reinterpret_cast<uintptr_t>(raw.data() + off) % 64) ++off; p = raw.data() + off; } double operator[](size_t i) const { return w16(p[i]); } };
static int bad = 0;
static double cmp(const char* name, const std::vector<double>& got, const std::vector<double>& want, double tol) {
  double e = 0, n = 0, worst = 0, big = 0; size_t nan = 0;
  for (size_t i = 0; i < got.size(); ++i) { if (!(std::isfinite(got[i])) || !std::isfinite(want[i])) { if (std::isfinite(got[i]) != std::isfinite(want[i])) ++nan; continue; } e += (got[i]-want[i])*(got[i]-want[i]); n += want[i]*want[i]; worst = std::max(worst, std::abs(got[i]-want[i])); big = std::max(big, std::abs(want[i])); }
  const double rel = n > 0 ? std::sqrt(e / n) : std::sqrt(e); const bool ok = nan == 0 && rel < tol && (big == 0 ? worst == 0 : worst < 6 * tol * big);
  std::printf("  %-10s rel %.2e worst %.2e nan %zu %s\n", name, rel, big > 0 ? worst / big : worst, nan, ok ? "ok" : "WRONG"); if (!ok) ++bad; return rel;
}
static void act_ref(int a, double g, double u, double lim, double& v, double& dg, double& du) {
  double ig = 1, iu = 1; if (a <= 1) { ig = !(g > lim); iu = !(u > lim || u < -lim); g = std::min(g, lim); u = std::min(std::max(u, -lim), lim); }
  auto sig = [](double x) { return 1 / (1 + std::exp(-x)); };
  auto gelu = [&](double x, double& d) { double c = std::sqrt(2 / M_PI), th = std::tanh(c * (x + 0.044715*x*x*x)); d = 0.5*(1+th) + 0.5*x*(1-th*th)*c*(1+3*0.044715*x*x); return 0.5*x*(1+th); };
  double d, s;
  switch (a) {
    case 0: s = sig(g); v = g*s*u; dg = s*(1+g*(1-s))*u*ig; du = g*s*iu; break;
    case 1: s = sig(1.702*g); v = g*s*(u+1); dg = s*(1+1.702*g*(1-s))*(u+1)*ig; du = g*s*iu; break;
    case 2: v = gelu(g, d); dg = d*u; du = v; v *= u; break;
    case 3: s = sig(g); v = g*s; dg = s*(1+g*(1-s)); du = 0; break;
    case 4: v = gelu(g, d); dg = d; du = 0; break;
    default: v = g > 0 ? g*g : 0; dg = g > 0 ? 2*g : 0; du = 0;
  }
}
int main(int argc, char** argv) {
  auto arg = [&](int i, double d) { return i < argc ? std::atof(argv[i]) : d; };
  const int64_t T = arg(1, 150), K = arg(2, 2), H = arg(3, 136), I = arg(4, 72), E = arg(5, 3);
  const int a = arg(6, 0); F16 = arg(7, 0); const bool biased = arg(8, 0), packed = arg(9, 1); const int64_t cap = arg(10, -1);
  const double limit = arg(11, INFINITY); const int seed = arg(12, 1); const std::string special = argc > 13 ? argv[13] : "";
  emu::rng.seed(getenv("SCHED") ? atoi(getenv("SCHED")) : seed); rg.seed(seed); emu_sms = getenv("SMS") ? atoi(getenv("SMS")) : 2 * (1 + seed % 3);
  const bool gated = a <= 2; const int64_t W = gated ? 2 * I : I;
  V16 x = rnd(T*H, 1), dy = rnd(T*H, 1), w1 = rnd(E*H*W, 1/std::sqrt(H)), w2 = rnd(E*I*H, 1/std::sqrt(I)), b1 = rnd(E*W, 0.5), b2 = rnd(E*H, 0.5);
  std::vector<int32_t> ids(T*K); std::vector<float> wt(T*K);
  for (auto& i : ids) i = int(rg() % (E + 1)) - 1; for (auto& w : wt) w = float(nrm());
  if (special == "one") for (auto& i : ids) i = E - 1;
  if (special == "none") for (auto& i : ids) i = -1;
  if (special == "empty") for (auto& i : ids) if (i == 1 || i == 0) i = -1;
  std::vector<char> masked(T, 0);
  for (int64_t t = 0; t < T; ++t) if (t % 7 == 3) { masked[t] = 1; for (int k = 0; k < K; ++k) { ids[t*K+k] = k % 2 ? -1 : int(E + 5); wt[t*K+k] = NAN; } for (int h = 0; h < H; ++h) x[t*H+h] = dy[t*H+h] = F16 ? 0x7e00 : 0x7fc0; }
  // aligned copies of the operands
  auto align = [](const V16& v) { auto o = std::make_unique<Out>(v.size()); std::memcpy(o->p, v.data(), v.size()*2); return o; };
  V16 gsplit, usplit, bgs, bus; if (!packed && gated) { gsplit.resize(E*H*I); usplit.resize(E*H*I); bgs.resize(E*I); bus.resize(E*I); for (int64_t r = 0; r < E*H; ++r) for (int64_t i = 0; i < I; ++i) { gsplit[r*I+i] = w1[r*W+i]; usplit[r*I+i] = w1[r*W+I+i]; } for (int64_t e = 0; e < E; ++e) for (int64_t i = 0; i < I; ++i) { bgs[e*I+i] = b1[e*W+i]; bus[e*I+i] = b1[e*W+I+i]; } }
  auto X = align(x), DY = align(dy), W1 = align(w1), W2 = align(w2), B1 = align(b1), B2 = align(b2), GS = align(gsplit), US = align(usplit), BG = align(bgs), BU = align(bus);
  Out y(T*H), dx(T*H), dw1(E*H*W), dw2(E*I*H), db1(E*W), db2(E*H), dgs(gsplit.size()), dus(usplit.size()), dbg(bgs.size()), dbu(bus.size());
  std::vector<float> dwt(T*K, NAN);
  const DType dt = F16 ? DType::kF16 : DType::kBF16;
  ExpertWeights ws; const bool split = !packed && gated;
  ws.gate = split ? ExpertMatrix<const void*>{GS->p, H*I, I} : ExpertMatrix<const void*>{W1->p, H*W, W};
  if (gated) ws.up = split ? ExpertMatrix<const void*>{US->p, H*I, I} : ExpertMatrix<const void*>{W1->p + I, H*W, W};
  ws.down = {W2->p, I*H, H};
  if (biased) { ws.b_gate = split ? ExpertMatrix<const void*>{BG->p, I, I} : ExpertMatrix<const void*>{B1->p, W, W}; if (gated) ws.b_up = split ? ExpertMatrix<const void*>{BU->p, I, I} : ExpertMatrix<const void*>{B1->p + I, W, W}; ws.b_down = {B2->p, H, H}; }
  if (prepare_device() != cudaSuccess) return 3;
  std::vector<double> wy(T*H), wdx(T*H), wdwt(T*K), wdw1(E*H*W), wdw2(E*I*H), wdb1(E*W), wdb2(E*H);
  std::vector<int64_t> used(E);
  for (int64_t t = 0; t < T; ++t) for (int64_t k = 0; k < K; ++k) {
    const int e = ids[t*K+k]; if (e < 0 || e >= E) continue; if (cap >= 0 && used[e] >= cap) continue; ++used[e];
    std::vector<double> g(I), u(I), v(I), dg(I), du(I), dA(I), row(H);
    for (int64_t i = 0; i < I; ++i) { double s = biased ? w16(b1[e*W+i]) : 0, q = biased && gated ? w16(b1[e*W+I+i]) : 0; for (int64_t h = 0; h < H; ++h) { s += w16(x[t*H+h]) * w16(w1[(e*H+h)*W+i]); if (gated) q += w16(x[t*H+h]) * w16(w1[(e*H+h)*W+I+i]); } g[i] = s; u[i] = q; act_ref(a, s, q, limit, v[i], dg[i], du[i]); }
    const double w = wt[t*K+k]; double dd = 0;
    for (int64_t h = 0; h < H; ++h) { double s = biased ? w16(b2[e*H+h]) : 0; for (int64_t i = 0; i < I; ++i) s += v[i] * w16(w2[(e*I+i)*H+h]); row[h] = s; wy[t*H+h] += w * s; dd += w16(dy[t*H+h]) * s; wdb2[e*H+h] += w * w16(dy[t*H+h]); }
    wdwt[t*K+k] = dd;
    for (int64_t i = 0; i < I; ++i) { double s = 0; for (int64_t h = 0; h < H; ++h) { s += w16(dy[t*H+h]) * w16(w2[(e*I+i)*H+h]); wdw2[(e*I+i)*H+h] += w * v[i] * w16(dy[t*H+h]); } dg[i] *= w * s; du[i] *= w * s; wdb1[e*W+i] += dg[i]; if (gated) wdb1[e*W+I+i] += du[i]; }
    for (int64_t h = 0; h < H; ++h) { double s = 0; for (int64_t i = 0; i < I; ++i) { s += dg[i] * w16(w1[(e*H+h)*W+i]); wdw1[(e*H+h)*W+i] += w16(x[t*H+h]) * dg[i]; if (gated) { s += du[i] * w16(w1[(e*H+h)*W+I+i]); wdw1[(e*H+h)*W+I+i] += w16(x[t*H+h]) * du[i]; } } wdx[t*H+h] += s; }
  }
  std::printf("T%ld K%ld H%ld I%ld E%ld act %d f16 %d bias %d packed %d cap %ld limit %g seed %d sms %d %s\n", T, K, H, I, E, a, F16, biased, packed, cap, limit, seed, emu_sms, special.c_str());
  const double tol = F16 ? 2e-3 : 1.2e-2;
  auto vec = [](const Out& o) { std::vector<double> v(o.n); for (size_t i = 0; i < o.n; ++i) v[i] = o[i]; return v; };
  if (special != "bwd") {
    ForwardArgs f; f.x = X->p; f.topk_ids = ids.data(); f.topk_weights = wt.data(); f.y = y.p; f.weights = ws; f.num_tokens = T; f.top_k = K; f.hidden = H; f.intermediate = I; f.num_experts = E; f.activation = Activation(a); f.limit = limit; f.dtype = dt; if (cap >= 0) f.capacity = cap;
    f.gather = seed % 2 ? Gather::kFused : Gather::kSeparate;
    AlignedBuf wsf(forward_bytes(T, K, H, I, E));
    if (launch_forward_sm90(f, wsf.p, nullptr) != cudaSuccess) return 4;
    cmp("y", vec(y), wy, tol);
  }
  BackwardArgs b; b.x = X->p; b.dy = DY->p; b.topk_ids = ids.data(); b.topk_weights = wt.data(); b.dx = dx.p; b.d_weights = dwt.data(); b.weights = ws;
  b.gradients.gate = split ? ExpertMatrix<void*>{dgs.p, H*I, I} : ExpertMatrix<void*>{dw1.p, H*W, W};
  if (gated) b.gradients.up = split ? ExpertMatrix<void*>{dus.p, H*I, I} : ExpertMatrix<void*>{dw1.p + I, H*W, W};
  b.gradients.down = {dw2.p, I*H, H};
  if (biased) { b.gradients.b_gate = split ? ExpertMatrix<void*>{dbg.p, I, I} : ExpertMatrix<void*>{db1.p, W, W}; if (gated) b.gradients.b_up = split ? ExpertMatrix<void*>{dbu.p, I, I} : ExpertMatrix<void*>{db1.p + I, W, W}; b.gradients.b_down = {db2.p, H, H}; }
  b.sizes = {T, K, H, I, E, gated}; b.activation = Activation(a); b.limit = limit; b.dtype = dt; if (cap >= 0) b.capacity = cap;
  const size_t bytes = backward_bytes(b.sizes); AlignedBuf wsb(bytes);
  if (cudaError_t e = launch_backward_sm90(b, wsb.p, nullptr); e != cudaSuccess) { std::printf("launch %d\n", e); return 5; }
  for (size_t i = bytes; i < wsb.raw.size() - (wsb.p - wsb.raw.data()); ++i) if (wsb.p[i] != 0xFF) { std::printf("workspace overrun\n"); ++bad; break; }
  if (split) { for (int64_t r = 0; r < E*H; ++r) for (int64_t i = 0; i < I; ++i) { dw1.p[r*W+i] = dgs.p[r*I+i]; dw1.p[r*W+I+i] = dus.p[r*I+i]; } for (int64_t e = 0; e < E; ++e) for (int64_t i = 0; i < I; ++i) { db1.p[e*W+i] = dbg.p[e*I+i]; db1.p[e*W+I+i] = dbu.p[e*I+i]; } }
  if (getenv("DUMP")) {
    BackwardRows rows = make_backward_rows(wsb.p, b.sizes); Plan plan = make_backward_plan(wsb.p, b.sizes);
    const uint16_t* wa = static_cast<uint16_t*>(rows.wa); const uint16_t* dg = static_cast<uint16_t*>(rows.d_gate);
    for (int64_t r = 0; r < plan.totals[0] * 128; ++r) { const int32_t pair = plan.row_pair[r]; if (pair < 0) continue; const int64_t t = pair / K; const int e = ids[pair];
      int nb = 0, nd = 0, first = -1; double part = 0;
      for (int64_t i = 0; i < I; ++i) { double s = 0, q = 0, d = 0; for (int64_t h = 0; h < H; ++h) { s += w16(x[t*H+h]) * w16(w1[(e*H+h)*W+i]); if (gated) q += w16(x[t*H+h]) * w16(w1[(e*H+h)*W+I+i]); d += w16(dy[t*H+h]) * w16(w2[(e*I+i)*H+h]); } double v, g, u; act_ref(a, s, q, limit, v, g, u);
        if (!(std::abs(w16(wa[r*I+i]) - wt[pair] * v) < 0.03 * (std::abs(wt[pair]*v) + 0.3))) { ++nb; if (first < 0) first = i; } if (!(std::abs(w16(dg[r*I+i]) - wt[pair] * d * g) < 0.03 * (std::abs(wt[pair]*d*g) + 0.3))) ++nd; part += d * v; }
      double got = 0; for (int64_t gr = 0; gr < (I + 63) / 64; ++gr) got += rows.partial[gr * plan.row_capacity + r];
      if (nb || nd || std::abs(got - part) > 0.05 * (std::abs(part) + 1)) std::printf("row %ld pair %d e %d: wa bad %d (first %d) dg bad %d partial %g want %g w %g rw %g\n", r, pair, e, nb, first, nd, got, part, wt[pair], rows.row_weight[r]); } }
  cmp("dx", vec(dx), wdx, tol); cmp("d_weights", std::vector<double>(dwt.begin(), dwt.end()), wdwt, tol); cmp("d_gate_up", vec(dw1), wdw1, tol); cmp("d_down", vec(dw2), wdw2, tol);
  if (biased) { cmp("db_gate_up", vec(db1), wdb1, tol); cmp("db_down", vec(db2), wdb2, tol); }
  // wide: the same sums, which round to the narrow gradients
  {
    std::vector<float> f1(E*H*W + 16, NAN), f2(E*I*H + 16, NAN), g1(E*W + 16, NAN), g2(E*H + 16, NAN);
    auto al = [](std::vector<float>& v) { float* q = v.data(); while (reinterpret_cast<uintptr_t>(q) % 16) ++q; return q; };
    float *p1 = al(f1), *p2 = al(f2), *q1 = al(g1), *q2 = al(g2);
    BackwardArgs c = b; c.wide = true;
    c.gradients.gate = split ? ExpertMatrix<void*>{p1, H*I, I} : ExpertMatrix<void*>{p1, H*W, W};
    if (gated) c.gradients.up = split ? ExpertMatrix<void*>{p1 + E*H*I, H*I, I} : ExpertMatrix<void*>{p1 + I, H*W, W};
    c.gradients.down = {p2, I*H, H};
    if (biased) { c.gradients.b_gate = split ? ExpertMatrix<void*>{q1, I, I} : ExpertMatrix<void*>{q1, W, W}; if (gated) c.gradients.b_up = split ? ExpertMatrix<void*>{q1 + E*I, I, I} : ExpertMatrix<void*>{q1 + I, W, W}; c.gradients.b_down = {q2, H, H}; }
    AlignedBuf wsc(bytes);
    if (cudaError_t e = launch_backward_sm90(c, wsc.p, nullptr); e != cudaSuccess) { std::printf("wide launch %d\n", e); return 6; }
    size_t wrong = 0;
    auto check = [&](float got, uint16_t want) { if (emu_round(F16, got) != want) ++wrong; };
    for (int64_t r = 0; r < E*H; ++r) for (int64_t i = 0; i < W; ++i) { const int64_t n = r*W+i; check(split ? (i < I ? p1[r*I+i] : p1[E*H*I + r*I + i-I]) : p1[n], dw1.p[n]); }
    for (int64_t n = 0; n < E*I*H; ++n) check(p2[n], dw2.p[n]);
    if (biased) { for (int64_t e = 0; e < E; ++e) for (int64_t i = 0; i < W; ++i) check(split ? (i < I ? q1[e*I+i] : q1[E*I + e*I + i-I]) : q1[e*W+i], db1.p[e*W+i]); for (int64_t n = 0; n < E*H; ++n) check(q2[n], db2.p[n]); }
    for (auto* v : {&f1, &f2, &g1, &g2}) { float* q = al(*v); const size_t n = v == &f1 ? E*H*W : v == &f2 ? E*I*H : v == &g1 ? E*W : E*H; for (float* z = v->data(); z < v->data() + v->size(); ++z) if ((z < q || z >= q + n) && !std::isnan(*z)) { ++wrong; break; } }
    std::printf("  wide       %zu wrong\n", wrong); bad += wrong != 0;
  }
  // kept: the forward keeps gate and up and has the same y; a backward that reads them
  if (T > 0) {
    Out y2(T*H), kept(T*K*W), ex(T*H), e1(E*H*W), e2(E*I*H), c1(E*W), c2(E*H), s1(gsplit.size()), s2(usplit.size()), r1(bgs.size()), r2(bus.size());
    std::vector<float> ewt(T*K, NAN);
    ForwardArgs f; f.x = X->p; f.topk_ids = ids.data(); f.topk_weights = wt.data(); f.y = y2.p; f.gate_up = kept.p; f.weights = ws; f.num_tokens = T; f.top_k = K; f.hidden = H; f.intermediate = I; f.num_experts = E; f.activation = Activation(a); f.limit = limit; f.dtype = dt; if (cap >= 0) f.capacity = cap;
    AlignedBuf wsf(forward_bytes(T, K, H, I, E));
    if (cudaError_t e = launch_forward_sm90(f, wsf.p, nullptr); e != cudaSuccess) { std::printf("kept forward %d\n", e); return 7; }
    size_t wrong = 0; if (special != "bwd") for (int64_t n = 0; n < T*H; ++n) wrong += y2.p[n] != y.p[n];
    std::vector<int64_t> seen(E); std::vector<double> gu, wgu;
    for (int64_t t = 0; t < T; ++t) for (int64_t k = 0; k < K; ++k) {
      const int e = ids[t*K+k]; bool taken = e >= 0 && e < E; if (taken && cap >= 0 && seen[e] >= cap) taken = false; if (taken) ++seen[e];
      for (int64_t i = 0; i < W; ++i) { const uint16_t v = kept.p[(t*K+k)*W+i]; if (!taken) { wrong += v != 0; continue; }
        double q = biased ? w16(b1[e*W+i]) : 0; for (int64_t h = 0; h < H; ++h) q += w16(x[t*H+h]) * w16(w1[(e*H+h)*W+i]); gu.push_back(w16(v)); wgu.push_back(q); } }
    std::printf("  kept       %zu wrong\n", wrong); bad += wrong != 0; cmp("gate_up", gu, wgu, tol);
    BackwardArgs c = b; c.dx = ex.p; c.d_weights = ewt.data(); c.gate_up = kept.p;
    c.gradients.gate = split ? ExpertMatrix<void*>{s1.p, H*I, I} : ExpertMatrix<void*>{e1.p, H*W, W};
    if (gated) c.gradients.up = split ? ExpertMatrix<void*>{s2.p, H*I, I} : ExpertMatrix<void*>{e1.p + I, H*W, W};
    c.gradients.down = {e2.p, I*H, H};
    if (biased) { c.gradients.b_gate = split ? ExpertMatrix<void*>{r1.p, I, I} : ExpertMatrix<void*>{c1.p, W, W}; if (gated) c.gradients.b_up = split ? ExpertMatrix<void*>{r2.p, I, I} : ExpertMatrix<void*>{c1.p + I, W, W}; c.gradients.b_down = {c2.p, H, H}; }
    AlignedBuf wsc(bytes);
    if (cudaError_t e = launch_backward_sm90(c, wsc.p, nullptr); e != cudaSuccess) { std::printf("kept launch %d\n", e); return 8; }
    if (split) { for (int64_t r = 0; r < E*H; ++r) for (int64_t i = 0; i < I; ++i) { e1.p[r*W+i] = s1.p[r*I+i]; e1.p[r*W+I+i] = s2.p[r*I+i]; } for (int64_t e = 0; e < E; ++e) for (int64_t i = 0; i < I; ++i) { c1.p[e*W+i] = r1.p[e*I+i]; c1.p[e*W+I+i] = r2.p[e*I+i]; } }
    cmp("k dx", vec(ex), wdx, 1.5*tol); cmp("k d_wts", std::vector<double>(ewt.begin(), ewt.end()), wdwt, 1.5*tol); cmp("k d_gate_up", vec(e1), wdw1, 1.5*tol); cmp("k d_down", vec(e2), wdw2, 1.5*tol);
    if (biased) { cmp("k db_g_u", vec(c1), wdb1, 1.5*tol); cmp("k db_down", vec(c2), wdb2, 1.5*tol); }
    for (const Out* o : {&y2, &kept, &ex, &e1, &e2, &c1, &c2, &s1, &s2, &r1, &r2}) for (const uint16_t* q = o->raw.data(); q < o->raw.data() + o->raw.size(); ++q) if ((q < o->p || q >= o->p + o->n) && *q != 0xFFFF) { std::printf("kept: wrote outside of an output\n"); ++bad; break; }
  }
  // exact zeros
  for (int64_t e = 0; e < E; ++e) if (!used[e]) for (int64_t i = 0; i < H*W; ++i) if (dw1.p[e*H*W+i] != 0) { std::printf("expert %ld without rows: not +0\n", e); ++bad; break; }
  for (int64_t t = 0; t < T; ++t) if (masked[t]) for (int64_t h = 0; h < H; ++h) if (dx.p[t*H+h] != 0) { std::printf("masked token: not +0\n"); ++bad; break; }
  // guard bytes behind outputs
  for (const Out* o : {&y, &dx, &dw1, &dw2, &db1, &db2, &dgs, &dus, &dbg, &dbu}) for (const uint16_t* q = o->raw.data(); q < o->raw.data() + o->raw.size(); ++q) if ((q < o->p || q >= o->p + o->n) && *q != 0xFFFF) { std::printf("wrote outside of an output\n"); ++bad; break; }
  // bits, for comparing runs
  uint64_t hash = 1469598103934665603ull; auto mix = [&](const void* d, size_t n) { for (size_t i = 0; i < n; ++i) hash = (hash ^ static_cast<const uint8_t*>(d)[i]) * 1099511628211ull; };
  mix(dx.p, dx.n*2); mix(dwt.data(), dwt.size()*4); mix(dw1.p, dw1.n*2); mix(dw2.p, dw2.n*2); if (biased) { mix(db1.p, db1.n*2); mix(db2.p, db2.n*2); }
  std::printf("  hash %016lx %s\n", hash, bad ? "FAILED" : "passed"); return bad ? 1 : 0;
}
