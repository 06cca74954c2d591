// CSR times CSR to CSR becomes kernel.multiply_rows; all else is refused.
// RUN: gossamer-opt %s -p 'multiply-rows' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: func.func @spgemm(
// CHECK-NOT:     linalg
// CHECK:         %[[C:.*]] = "kernel.multiply_rows"(%{{.*}}, %{{.*}})
// CHECK:         return %[[C]]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#maps = {indexing_maps = [affine_map<(i, j, k) -> (i, k)>, affine_map<(i, j, k) -> (k, j)>, affine_map<(i, j, k) -> (i, j)>],
         iterator_types = ["parallel", "parallel", "reduction"]}
func.func @spgemm(%a: tensor<?x?xf32, #CSR>, %b: tensor<?x?xf32, #CSR>, %m: index, %n: index) -> tensor<?x?xf32, #CSR> {
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32, #CSR>
  %c = linalg.generic #maps ins(%a, %b : tensor<?x?xf32, #CSR>, tensor<?x?xf32, #CSR>) outs(%empty : tensor<?x?xf32, #CSR>) {
  ^bb0(%x: f32, %y: f32, %sum: f32):
    %0 = arith.mulf %x, %y : f32
    %1 = arith.addf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<?x?xf32, #CSR>
  return %c : tensor<?x?xf32, #CSR>
}

// -----

// A difference.
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#maps = {indexing_maps = [affine_map<(i, j, k) -> (i, k)>, affine_map<(i, j, k) -> (k, j)>, affine_map<(i, j, k) -> (i, j)>],
         iterator_types = ["parallel", "parallel", "reduction"]}
func.func @other(%a: tensor<?x?xf32, #CSR>, %b: tensor<?x?xf32, #CSR>, %m: index, %n: index) -> tensor<?x?xf32, #CSR> {
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32, #CSR>
  // expected-error @unknown {{the gustavson schedule computes CSR x CSR to CSR in f32 or f64, not linalg.generic}}
  %c = linalg.generic #maps ins(%a, %b : tensor<?x?xf32, #CSR>, tensor<?x?xf32, #CSR>) outs(%empty : tensor<?x?xf32, #CSR>) {
  ^bb0(%x: f32, %y: f32, %sum: f32):
    %0 = arith.mulf %x, %y : f32
    %1 = arith.subf %sum, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<?x?xf32, #CSR>
  return %c : tensor<?x?xf32, #CSR>
}
