// A chain may store results in any order of rows, so those that need like numbers of lines make a strip.
// RUN: gossamer-opt %s -p 'choose-format{schedule=lookup8 features=avx512vbmi+bytedots chain=true}' | filecheck %s --check-prefix=CHAIN
// RUN: gossamer-opt %s -p 'choose-format{schedule=lookup8 features=avx512vbmi+bytedots}' | filecheck %s --check-prefix=ALONE
// RUN: gossamer-opt %s -p 'choose-format{schedule=quads features=avx512vbmi+bytedots chain=true}' | filecheck %s --check-prefix=SAME

// CHAIN: %{{.*}}: tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=1)">
// ALONE: %{{.*}}: tensor<40x70xi8, "bytewindows(reduction=1, rows=16, sorted=0)">
// SAME:  %{{.*}}: tensor<40x70xi8, "quads({{.*}})">
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @region(%x: tensor<?x70xi8>, %w: tensor<40x70xi8, #CSR> {kernel.density = 0.1 : f64}) -> tensor<?x40xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]} : (tensor<?x70xi8>, tensor<40x70xi8, #CSR>) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
