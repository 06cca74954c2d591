// Products with dense matrices become kernel.inner where they are read.
// RUN: gossamer-opt %s -p 'lift-inner,canonicalize' --split-input-file | filecheck %s

#M = affine_map<(d0, d1) -> (d0, d1)>
#X = affine_map<(d0, d1, d2) -> (d0, d2)>
#W = affine_map<(d0, d1, d2) -> (d1, d2)>
#T = affine_map<(d0, d1, d2) -> (d2, d1)>
#Y = affine_map<(d0, d1, d2) -> (d0, d1)>

// One body reads the product, once: it goes into it. Factors of bf16 are summed in f32.
// CHECK-LABEL: func.func @read_once(
// CHECK-NOT:     linalg.generic {{.*}}reduction
// CHECK:         "kernel.map"() ({
// CHECK-NEXT:      %[[SUM:.*]] = "kernel.inner"(%arg0, %arg1) {reduction = 1 : i64} : (tensor<?x2xbf16>, tensor<8x2xbf16>) -> f32
// CHECK-NEXT:      arith.negf %[[SUM]]
func.func @read_once(%x: tensor<?x2xbf16>, %w: tensor<8x2xbf16>) -> tensor<?x8xf32> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %t = tensor.dim %x, %c0 : tensor<?x2xbf16>
  %e = tensor.empty(%t) : tensor<?x8xf32>
  %init = linalg.fill ins(%zero : f32) outs(%e : tensor<?x8xf32>) -> tensor<?x8xf32>
  %p = linalg.generic {indexing_maps = [#X, #W, #Y], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x2xbf16>, tensor<8x2xbf16>) outs(%init : tensor<?x8xf32>) {
  ^bb0(%a: bf16, %b: bf16, %out: f32):
    %0 = arith.extf %a : bf16 to f32
    %1 = arith.extf %b : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %out, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?x8xf32>
  %y = "kernel.map"() ({
    %0 = "kernel.read"(%p) {map = #M} : (tensor<?x8xf32>) -> f32
    %1 = arith.negf %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

#X = affine_map<(d0, d1, d2) -> (d0, d2)>
#T = affine_map<(d0, d1, d2) -> (d2, d1)>
#Y = affine_map<(d0, d1, d2) -> (d0, d1)>

// A product that leaves the function is a map of its own; its matrix may lie the other way round.
// CHECK-LABEL: func.func @returned(
// CHECK:         "kernel.map"() ({
// CHECK-NEXT:      "kernel.inner"(%arg0, %arg1) {reduction = 0 : i64}
func.func @returned(%x: tensor<?x2xf32>, %w: tensor<2x8xf32>) -> tensor<?x8xf32> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %t = tensor.dim %x, %c0 : tensor<?x2xf32>
  %e = tensor.empty(%t) : tensor<?x8xf32>
  %init = linalg.fill ins(%zero : f32) outs(%e : tensor<?x8xf32>) -> tensor<?x8xf32>
  %p = linalg.generic {indexing_maps = [#X, #T, #Y], iterator_types = ["parallel", "parallel", "reduction"]}
    ins(%x, %w : tensor<?x2xf32>, tensor<2x8xf32>) outs(%init : tensor<?x8xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %2 = arith.mulf %a, %b : f32
    %3 = arith.addf %out, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?x8xf32>
  return %p : tensor<?x8xf32>
}
