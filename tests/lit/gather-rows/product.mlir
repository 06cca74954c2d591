// CSR of any size times dense becomes kernel.gather_rows; all else is refused.
// RUN: gossamer-opt %s -p 'func.func(linalg-generalize-named-ops),linalg-fuse-elementwise-ops,gather-rows{bits=256}' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: func.func @spmm(
// CHECK-NOT:     linalg
// CHECK:         %[[Y:.*]] = "kernel.gather_rows"(%{{.*}}, %{{.*}}) {lanes = 8 : i64, vectors = 8 : i64}
// CHECK:         return %[[Y]]
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @spmm(%a: tensor<?x?xf32, #CSR>, %x: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  %y = linalg.matmul ins(%a, %x : tensor<?x?xf32, #CSR>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

// By columns.
#CSC = #sparse_tensor.encoding<{map = (d0, d1) -> (d1 : dense, d0 : compressed)}>
func.func @csc(%a: tensor<?x?xf32, #CSC>, %x: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  // expected-error @unknown {{the rows schedule computes CSR x dense in f32 or f64, not linalg.generic}}
  %y = linalg.matmul ins(%a, %x : tensor<?x?xf32, #CSC>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
