// The product of dense matrices becomes kernel.tall_product; all else is refused.
// RUN: gossamer-opt %s -p 'func.func(linalg-generalize-named-ops),linalg-fuse-elementwise-ops,multiply-tall{bits=256}' --split-input-file --verify-diagnostics | filecheck %s

// CHECK-LABEL: func.func @product(
// CHECK-NOT:     linalg
// CHECK:         %[[Y:.*]] = "kernel.tall_product"(%{{.*}}, %{{.*}}) {lanes = 8 : i64, vectors = 2 : i64}
// CHECK:         return %[[Y]]
func.func @product(%x: tensor<?x?xf32>, %w: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  %y = linalg.matmul ins(%x, %w : tensor<?x?xf32>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

// With the transpose of w.
#turned = [affine_map<(i, j, k) -> (i, k)>, affine_map<(i, j, k) -> (j, k)>, affine_map<(i, j, k) -> (i, j)>]
func.func @turned(%x: tensor<?x?xf32>, %w: tensor<?x?xf32>, %m: index, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%m, %n) : tensor<?x?xf32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?xf32>) -> tensor<?x?xf32>
  // expected-error @unknown {{the tall schedule computes dense x dense in f32 or f64, not linalg.generic}}
  %y = linalg.matmul indexing_maps = #turned ins(%x, %w : tensor<?x?xf32>, tensor<?x?xf32>) outs(%start : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}
