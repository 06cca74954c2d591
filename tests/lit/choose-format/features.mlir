// Schedules that ask for instructions of the target.
// RUN: gossamer-opt %s -p 'fuse-epilogue,choose-format{schedule=amx features=amx}' | filecheck %s --check-prefix=AMX
// RUN: gossamer-opt %s -p 'fuse-epilogue,choose-format{schedule=bf16dot features=bf16dots+amx}' | filecheck %s --check-prefix=DOT
// RUN: gossamer-opt %s -p 'fuse-epilogue,choose-format{schedule=pairs features=bf16dots}' | filecheck %s --check-prefix=PAIRS
// RUN: not gossamer-opt %s -p 'fuse-epilogue,choose-format{schedule=amx features=bf16dots}' 2>&1 | filecheck %s --check-prefix=NONE

// Blocks of 64 x 64 are strips of two tiles of 16 rows, and as wide as a tile.
// AMX: %{{.*}}: tensor<128x160xbf16, "vnni(reduction=1, rows=32, columns=32)">
// DOT: %{{.*}}: tensor<128x160xbf16, "vnni(reduction=1, rows=32, columns=32)">

// K in equal blocks.
// PAIRS: %{{.*}}: tensor<128x160xbf16, "pairs(reduction=1, width=160)">
// NONE: no amx schedule for a weight of type
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @region(%x: tensor<?x160xbf16>, %w: tensor<128x160xbf16, #CSR> {kernel.block = [64, 64]}) -> tensor<?x128xbf16> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %t = tensor.dim %x, %c0 : tensor<?x160xbf16>
  %start = tensor.empty(%t) : tensor<?x128xf32>
  %init = linalg.fill ins(%zero : f32) outs(%start : tensor<?x128xf32>) -> tensor<?x128xf32>
  %sums = linalg.generic {
    indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>, affine_map<(t, m, k) -> (t, m)>],
    iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x160xbf16>, tensor<128x160xbf16, #CSR>) outs(%init : tensor<?x128xf32>) {
  ^bb0(%a: bf16, %b: bf16, %sum: f32):
    %0 = arith.extf %a : bf16 to f32
    %1 = arith.extf %b : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %sum, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?x128xf32>
  %empty = tensor.empty(%t) : tensor<?x128xbf16>
  %y = linalg.generic {
    indexing_maps = [affine_map<(t, m) -> (t, m)>, affine_map<(t, m) -> (t, m)>], iterator_types = ["parallel", "parallel"]}
    ins(%sums : tensor<?x128xf32>) outs(%empty : tensor<?x128xbf16>) {
  ^bb0(%a: f32, %old: bf16):
    %0 = arith.truncf %a : f32 to bf16
    linalg.yield %0 : bf16
  } -> tensor<?x128xbf16>
  return %y : tensor<?x128xbf16>
}
