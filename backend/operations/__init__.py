"""Operations on SparseTensors in a graph: folded, fused, put in the cheaper order."""
